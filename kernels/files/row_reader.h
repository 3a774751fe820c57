// Rows of tables that stay in the files of a checkpoint, read by several threads ahead of use.
//
// A row is read past the page cache (O_DIRECT) where the file system allows it: pages around single rows of tables
// that are larger than RAM would only drive other files' pages out. Rows that were read lately are kept.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "kernels/files/direct_reads.h"

namespace moebius::files {

// Consecutive rows of one tensor, in one file.
struct FileRows {
  std::string path;
  uint64_t offset;  // of the first row, bytes
  uint64_t rows;
};

// One tensor of a table; its rows follow one another through all parts.
struct StoredRows {
  size_t row_bytes;
  std::vector<FileRows> parts;
};

class RowFetch;

// What a reader did so far.
struct ReadCounters {
  uint64_t read = 0;  // rows from files
  uint64_t kept = 0;  // rows that were still in memory
};

// One table: tensors with the same rows, such as codes and their scales. Any thread may start a fetch.
class RowReader {
 public:
  // `kept_bytes`: of rows that are kept in memory, the least recently used ones leave first. Throws
  // std::invalid_argument for tensors of different rows, ReadError for a file that is too short or can not be opened.
  RowReader(std::shared_ptr<ReadThreads> threads, std::vector<StoredRows> tensors, uint64_t kept_bytes);
  RowReader(const RowReader&) = delete;
  RowReader& operator=(const RowReader&) = delete;

  uint64_t num_rows() const { return num_rows_; }
  size_t num_tensors() const { return tensors_.size(); }
  size_t row_bytes(size_t tensor) const { return tensors_[tensor].row_bytes; }
  bool is_direct() const;  // whether all files are read past the page cache
  ReadCounters counters() const;

 private:
  friend class RowFetch;

  struct Part {
    size_t file;
    uint64_t offset, first_row;
  };
  struct Tensor {
    size_t row_bytes;
    std::vector<Part> parts;  // ascending by first_row
  };

  size_t opened(const std::string& path);
  void read(size_t tensor, uint64_t row, uint8_t* output, std::vector<uint8_t>& scratch) const;
  bool take_kept(int64_t row, uint8_t* const* outputs);    // with mutex_
  void keep(int64_t row, const uint8_t* const* outputs);  // with mutex_

  std::shared_ptr<ReadThreads> threads_;
  std::vector<std::unique_ptr<DirectFile>> files_;
  std::vector<Tensor> tensors_;
  uint64_t num_rows_ = 0;
  size_t entry_bytes_ = 0, capacity_ = 0;

  // Rows that are kept, the most recently used first, with their places in `memory_`.
  struct Kept {
    int64_t row;
    size_t place;
  };
  mutable std::mutex mutex_;
  std::list<Kept> order_;
  std::unordered_map<int64_t, std::list<Kept>::iterator> by_row_;
  std::unique_ptr<uint8_t[]> memory_;
  ReadCounters counters_;
};

// The distinct rows that some numbers name, on their way. Used by one thread; the reader's threads fill it.
class RowFetch final : public ReadWork {
 public:
  // Numbers outside the table have the place -1 and are not read.
  RowFetch(std::shared_ptr<RowReader> reader, const int64_t* rows, size_t count);
  ~RowFetch() override;
  RowFetch(const RowFetch&) = delete;
  RowFetch& operator=(const RowFetch&) = delete;

  const std::vector<int64_t>& places() const { return places_; }  // of each number, among the distinct rows
  size_t num_distinct() const { return distinct_.size(); }

  // Reads what no thread has begun, and waits for the rest. Throws ReadError.
  void wait();

  // Distinct rows of a tensor, one after the other, once `wait` has returned; gives the memory away.
  std::unique_ptr<uint8_t[]> take(size_t tensor) { return std::move(outputs_[tensor]); }

 private:
  bool read_next(std::vector<uint8_t>& scratch) override;
  size_t num_parts() const override { return missing_.size(); }

  std::shared_ptr<RowReader> reader_;
  std::vector<int64_t> distinct_, places_;
  std::vector<size_t> missing_;  // which of the distinct rows are read from files
  std::vector<std::unique_ptr<uint8_t[]>> outputs_;
  std::atomic<size_t> next_{0};
  std::mutex error_mutex_;
  std::string error_;
};

}  // namespace moebius::files
