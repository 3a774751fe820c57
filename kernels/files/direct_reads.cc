#include "kernels/files/direct_reads.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace moebius::files {

namespace {

std::string reason(int error) { return std::strerror(error); }  // NOLINT(concurrency-mt-unsafe): glibc's is safe

}  // namespace

uint8_t* aligned(std::vector<uint8_t>& scratch, size_t bytes) {
  if (scratch.size() < bytes + kBlock) scratch.resize(bytes + kBlock);
  const auto address = reinterpret_cast<uintptr_t>(scratch.data());
  return scratch.data() + (kBlock - address % kBlock) % kBlock;
}

// Past the page cache if one block can be read so, or as any other.
DirectFile::DirectFile(std::string path) : path_(std::move(path)) {
  std::vector<uint8_t> scratch;
  const int direct = open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (direct >= 0) {
    if (pread(direct, aligned(scratch, kBlock), kBlock, 0) >= 0) {
      descriptor_ = direct;
      is_direct_ = true;
      return;
    }
    close(direct);
  }
  descriptor_ = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor_ < 0) throw ReadError(path_ + " cannot be opened: " + reason(errno));
  posix_fadvise(descriptor_, 0, 0, POSIX_FADV_RANDOM);
}

DirectFile::~DirectFile() { close(descriptor_); }

uint64_t DirectFile::bytes() const {
  struct stat found {};
  if (fstat(descriptor_, &found) != 0) throw ReadError(path_ + " cannot be looked at: " + reason(errno));
  return static_cast<uint64_t>(found.st_size);
}

void DirectFile::read(uint64_t offset, size_t size, size_t needed, uint8_t* output, const char* what) const {
  size_t done = 0;
  while (done < needed) {
    const ssize_t count = pread(descriptor_, output + done, size - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      const std::string why = count < 0 ? "could not be read: " + reason(errno) : "ended";
      throw ReadError(path_ + " at byte " + std::to_string(offset + done) + ", where " + what + " lie, " + why);
    }
    done += static_cast<size_t>(count);
  }
}

ReadThreads::ReadThreads(int num_threads) {
  if (num_threads < 1) throw std::invalid_argument("num_threads must be at least 1");
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
}

ReadThreads::~ReadThreads() {
  {
    const std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  added_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ReadThreads::add(ReadWork* work) {
  {
    const std::lock_guard lock(mutex_);
    work_.push_back(work);
  }
  if (work->num_parts() > 1) {
    added_.notify_all();
  } else {
    added_.notify_one();
  }
}

void ReadThreads::remove(ReadWork* work) {
  std::unique_lock lock(mutex_);
  std::erase(work_, work);
  left_.wait(lock, [work] { return work->active_ == 0; });
}

void ReadThreads::run() {
  std::vector<uint8_t> scratch;
  std::unique_lock lock(mutex_);
  for (;;) {
    added_.wait(lock, [this] { return is_closing_ || !work_.empty(); });
    if (is_closing_) return;
    ReadWork* work = work_.front();
    ++work->active_;
    lock.unlock();
    while (work->read_next(scratch)) {
    }
    lock.lock();
    if (!work_.empty() && work_.front() == work) work_.pop_front();
    if (--work->active_ == 0) left_.notify_all();
  }
}

}  // namespace moebius::files
