// /init of the two-node guest: proves topology, pinning and page locality on a real kernel, then powers off.
// It prints one "PASS <check>" or "FAIL <check>: <why>" per line and "DONE <failures>" at the end.
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "kernels/topology/memory.h"
#include "kernels/topology/topology.h"

using namespace moebius::topology;

namespace {

constexpr size_t kBytes = 16u << 20;
int failures = 0;

void check(bool holds, const std::string& name, const std::string& detail = "") {
  if (!holds) ++failures;
  std::printf("%s %s%s%s\n", holds ? "PASS" : "FAIL", name.c_str(), detail.empty() ? "" : ": ", detail.c_str());
}

std::string text(const std::vector<int>& values) {
  std::string joined;
  for (int value : values) joined += (joined.empty() ? "" : ",") + std::to_string(value);
  return "[" + joined + "]";
}

unsigned char* map_pages() {
  void* pages = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return pages == MAP_FAILED ? nullptr : static_cast<unsigned char*>(pages);
}

// How many of the range's pages lie on `node`, as "n of m".
void check_all_on(const void* pages, int node, const std::string& name) {
  const std::vector<int> nodes = page_nodes(pages, kBytes);
  size_t there = 0;
  for (int found : nodes) there += found == node;
  check(there == nodes.size() && nodes.size() == kBytes / 4096, name,
        std::to_string(there) + " of " + std::to_string(nodes.size()) + " pages");
}

void check_topology(const Topology& topology) {
  check(topology.nodes.size() == 2, "two nodes", std::to_string(topology.nodes.size()));
  for (const NumaNode& node : topology.nodes) {
    const std::vector<int> expected = node.id == 0 ? std::vector<int>{0, 1, 2, 3} : std::vector<int>{4, 5, 6, 7};
    const std::string prefix = "node " + std::to_string(node.id) + " ";
    check(node.cpus == expected, prefix + "cpus", text(node.cpus));
    check(topology.usable_cpus(node.id) == expected, prefix + "usable cpus");
    const uint32_t threads = topology.recommended_threads(node.id);
    check(threads == 2, prefix + "a thread for each physical core", std::to_string(threads));
    const uint64_t mib = node.memory_total_bytes >> 20;
    check(mib > 300 && mib <= 512, prefix + "memory", std::to_string(mib) + " MiB");
    check(node.memory_allowed && node.memory_free_bytes <= node.memory_total_bytes, prefix + "memory allowed");
  }
  check(topology.server_nodes() == std::vector<int>{0, 1}, "one server per node", text(topology.server_nodes()));
  check(!topology.cpu_quota, "no quota without a cgroup");
}

void check_pinning(const Topology& topology) {
  for (const NumaNode& node : topology.nodes) {
    const std::string name = "pinned to node " + std::to_string(node.id);
    const BindResult result = pin_thread(node.cpus);
    check(result.applied, name, result.message);
    unsigned cpu = 99;
    unsigned running_on = 99;
    getcpu(&cpu, &running_on);
    check(int(running_on) == node.id, name + " and running there", "CPU " + std::to_string(cpu));
    check(Topology::detect().allowed_cpus == node.cpus, name + " and detected as the limit");
  }
  check(pin_thread(topology.allowed_cpus).applied, "unpinned");
}

void check_binding(int node, int other) {
  const std::string to = "node " + std::to_string(node);
  // From a CPU of the other node: only the policy can bring the pages here.
  pin_thread(Topology::detect().usable_cpus(other));
  const BindResult bound = bind_memory(node);
  check(bound.applied, "bind_memory to " + to, bound.message);
  unsigned char* touched = map_pages();
  check(page_nodes(touched, kBytes).front() < 0, "untouched pages lie nowhere");
  std::memset(touched, 1, kBytes);
  check_all_on(touched, node, "memory bound to " + to + " lies there");
  check(bind_memory(-1).applied, "default policy restored");

  unsigned char* local = map_pages();
  // Without a policy a huge page may come from the other node where none is free here; a small one does not.
  madvise(local, kBytes, MADV_NOHUGEPAGE);
  std::memset(local, 1, kBytes);
  check_all_on(local, other, "unbound memory is local to its thread");
  const BindResult moved = bind_range(local, kBytes, node);
  check(moved.applied, "bind_range to " + to, moved.message);
  check_all_on(local, node, "touched pages were moved to " + to);
  munmap(touched, kBytes);
  munmap(local, kBytes);
  pin_thread({0, 1, 2, 3});
}

void check_refusals() {
  const BindResult result = bind_memory(7);
  check(!result.applied && !result.message.empty(), "absent node is refused with a reason", result.message);
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  std::printf("\n");  // ends the firmware's last line
  mkdir("/proc", 0555);
  mkdir("/sys", 0555);
  mount("proc", "/proc", "proc", 0, nullptr);
  mount("sysfs", "/sys", "sysfs", 0, nullptr);
  try {
    const Topology topology = Topology::detect();
    check_topology(topology);
    check_pinning(topology);
    check_binding(0, 1);
    check_binding(1, 0);
    check_refusals();
  } catch (const std::exception& error) {
    check(false, "no exception", error.what());
  }
  std::printf("DONE %d\n", failures);
  sync();
  reboot(RB_POWER_OFF);
  return 1;
}
