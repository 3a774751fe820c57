// A pool's defaults: threads and spinning within affinity and cgroup quota.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

namespace moebius::pool {

// One thread per given cpu, else per cpu this thread may run on; no more than the whole cpus' worth of time that
// the cgroup's quota grants, at least 1: a thread more would only make the group stand still sooner. Throws
// std::runtime_error naming the cgroup file when that is malformed.
uint32_t default_threads(const std::vector<int>& cpus);

// How long a waiting thread spins before it sleeps. 100 us bridge the rest of a layer when a cpu is to spare; 50 us,
// when there is none, at least what the caller does before and between calls; nothing under a quota smaller than the
// number of threads, where every turn of a spinner is taken from the thread it waits for. Throws like
// default_threads.
std::chrono::nanoseconds default_spin(uint32_t threads);

}  // namespace moebius::pool
