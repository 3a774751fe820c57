// Files that are read past the page cache (O_DIRECT) where the file system allows it, and the threads that read them
// ahead of use. Pages of data that is larger than RAM would only drive other files' pages out.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace moebius::files {

// What disks and file systems that allow O_DIRECT want offsets, lengths and memory to be multiples of.
inline constexpr uint64_t kBlock = 4096;

// A file can not be opened or read, or ends too early; the message names it.
struct ReadError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Memory of the scratch, grown if needed, from a multiple of kBlock on.
uint8_t* aligned(std::vector<uint8_t>& scratch, size_t bytes);

class DirectFile {
 public:
  // Throws ReadError.
  explicit DirectFile(std::string path);
  ~DirectFile();
  DirectFile(const DirectFile&) = delete;
  DirectFile& operator=(const DirectFile&) = delete;

  const std::string& path() const { return path_; }
  bool is_direct() const { return is_direct_; }  // then all that is asked for lies at multiples of kBlock
  uint64_t bytes() const;                        // throws ReadError
  // Reads [offset, offset + size) until at least `needed` bytes are there. Throws ReadError, which names `what` lies
  // there.
  void read(uint64_t offset, size_t size, size_t needed, uint8_t* output, const char* what) const;

 private:
  std::string path_;
  int descriptor_ = -1;
  bool is_direct_ = false;
};

// What the threads read in parts, several threads at once.
class ReadWork {
 public:
  virtual ~ReadWork() = default;

 private:
  friend class ReadThreads;

  virtual bool read_next(std::vector<uint8_t>& scratch) = 0;  // false: all parts have been begun
  virtual size_t num_parts() const = 0;

  size_t active_ = 0;  // threads in `read_next`, with the mutex of ReadThreads
};

// Threads that read for all of a process's work, in the order in which it was added; most of their time they wait for a
// disk.
class ReadThreads {
 public:
  explicit ReadThreads(int num_threads);
  ~ReadThreads();
  ReadThreads(const ReadThreads&) = delete;
  ReadThreads& operator=(const ReadThreads&) = delete;

  void add(ReadWork* work);
  void remove(ReadWork* work);  // returns once no thread touches it

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable added_, left_;
  std::deque<ReadWork*> work_;
  bool is_closing_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace moebius::files
