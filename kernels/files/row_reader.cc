#include "kernels/files/row_reader.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace moebius::files {

RowReader::RowReader(std::shared_ptr<ReadThreads> threads, std::vector<StoredRows> tensors, uint64_t kept_bytes)
    : threads_(std::move(threads)) {
  if (tensors.empty()) throw std::invalid_argument("a table has at least one tensor");
  for (const auto& stored : tensors) {
    if (stored.row_bytes == 0) throw std::invalid_argument("rows of a table have at least one byte");
    Tensor tensor{stored.row_bytes, {}};
    uint64_t rows = 0;
    for (const auto& part : stored.parts) {
      const size_t file = opened(part.path);
      const uint64_t found = files_[file]->bytes(), end = part.offset + part.rows * stored.row_bytes;
      if (found < end) {
        throw ReadError(part.path + " has " + std::to_string(found) + " bytes, but rows of a table end at byte " +
                        std::to_string(end));
      }
      tensor.parts.push_back({file, part.offset, rows});
      rows += part.rows;
    }
    if (!tensors_.empty() && rows != num_rows_) {
      throw std::invalid_argument("tensors of one table have " + std::to_string(num_rows_) + " and " +
                                  std::to_string(rows) + " rows; they must have equally many");
    }
    num_rows_ = rows;
    entry_bytes_ += stored.row_bytes;
    tensors_.push_back(std::move(tensor));
  }
  capacity_ = std::min<uint64_t>(kept_bytes / entry_bytes_, num_rows_);
  // Pages of it are there once rows are kept in them.
  memory_ = std::make_unique_for_overwrite<uint8_t[]>(capacity_ * entry_bytes_);
}

size_t RowReader::opened(const std::string& path) {
  for (size_t i = 0; i < files_.size(); ++i) {
    if (files_[i]->path() == path) return i;
  }
  files_.push_back(std::make_unique<DirectFile>(path));
  return files_.size() - 1;
}

bool RowReader::is_direct() const {
  return std::all_of(files_.begin(), files_.end(), [](const auto& file) { return file->is_direct(); });
}

ReadCounters RowReader::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

void RowReader::read(size_t tensor, uint64_t row, uint8_t* output, std::vector<uint8_t>& scratch) const {
  const auto& [row_bytes, parts] = tensors_[tensor];
  // Parts without rows begin where the next one does: the last one that begins at or before the row has it.
  const auto after = std::upper_bound(parts.begin(), parts.end(), row,
                                      [](uint64_t wanted, const Part& part) { return wanted < part.first_row; });
  const Part& part = *std::prev(after);
  const DirectFile& file = *files_[part.file];
  const uint64_t offset = part.offset + (row - part.first_row) * row_bytes;
  constexpr const char* kWhat = "rows of a table";
  if (!file.is_direct()) {
    file.read(offset, row_bytes, row_bytes, output, kWhat);
    return;
  }
  const uint64_t begin = offset / kBlock * kBlock, end = (offset + row_bytes + kBlock - 1) / kBlock * kBlock;
  uint8_t* blocks = aligned(scratch, end - begin);
  file.read(begin, end - begin, offset - begin + row_bytes, blocks, kWhat);
  std::memcpy(output, blocks + (offset - begin), row_bytes);
}

bool RowReader::take_kept(int64_t row, uint8_t* const* outputs) {
  const auto found = by_row_.find(row);
  if (found == by_row_.end()) return false;
  order_.splice(order_.begin(), order_, found->second);
  const uint8_t* entry = memory_.get() + found->second->place * entry_bytes_;
  for (size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    std::memcpy(outputs[tensor], entry, tensors_[tensor].row_bytes);
    entry += tensors_[tensor].row_bytes;
  }
  return true;
}

void RowReader::keep(int64_t row, const uint8_t* const* outputs) {
  if (capacity_ == 0 || by_row_.contains(row)) return;  // another fetch may have brought it
  if (order_.size() < capacity_) {
    order_.push_front({row, order_.size()});
  } else {
    order_.splice(order_.begin(), order_, std::prev(order_.end()));
    by_row_.erase(order_.front().row);
    order_.front().row = row;
  }
  by_row_[row] = order_.begin();
  uint8_t* entry = memory_.get() + order_.front().place * entry_bytes_;
  for (size_t tensor = 0; tensor < tensors_.size(); ++tensor) {
    std::memcpy(entry, outputs[tensor], tensors_[tensor].row_bytes);
    entry += tensors_[tensor].row_bytes;
  }
}

RowFetch::RowFetch(std::shared_ptr<RowReader> reader, const int64_t* rows, size_t count)
    : reader_(std::move(reader)), places_(count) {
  std::unordered_map<int64_t, int64_t> seen;
  seen.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    if (rows[i] < 0 || static_cast<uint64_t>(rows[i]) >= reader_->num_rows_) {
      places_[i] = -1;
      continue;
    }
    const auto [found, is_new] = seen.try_emplace(rows[i], static_cast<int64_t>(distinct_.size()));
    if (is_new) distinct_.push_back(rows[i]);
    places_[i] = found->second;
  }
  const size_t num_tensors = reader_->num_tensors();
  for (size_t tensor = 0; tensor < num_tensors; ++tensor) {
    outputs_.push_back(std::make_unique_for_overwrite<uint8_t[]>(distinct_.size() * reader_->row_bytes(tensor)));
  }
  {
    std::vector<uint8_t*> row(num_tensors);
    const std::lock_guard lock(reader_->mutex_);
    for (size_t i = 0; i < distinct_.size(); ++i) {
      for (size_t t = 0; t < num_tensors; ++t) row[t] = outputs_[t].get() + i * reader_->row_bytes(t);
      if (!reader_->take_kept(distinct_[i], row.data())) missing_.push_back(i);
    }
    reader_->counters_.read += missing_.size();
    reader_->counters_.kept += distinct_.size() - missing_.size();
  }
  if (!missing_.empty()) reader_->threads_->add(this);
}

RowFetch::~RowFetch() {
  next_ = missing_.size();
  reader_->threads_->remove(this);
}

bool RowFetch::read_next(std::vector<uint8_t>& scratch) {
  const size_t index = next_.fetch_add(1);
  if (index >= missing_.size()) return false;
  const size_t place = missing_[index];
  try {
    for (size_t tensor = 0; tensor < outputs_.size(); ++tensor) {
      uint8_t* output = outputs_[tensor].get() + place * reader_->row_bytes(tensor);
      reader_->read(tensor, static_cast<uint64_t>(distinct_[place]), output, scratch);
    }
  } catch (const std::exception& error) {
    const std::lock_guard lock(error_mutex_);
    if (error_.empty()) error_ = error.what();
    next_ = missing_.size();  // no one will use the rest
  }
  return true;
}

void RowFetch::wait() {
  std::vector<uint8_t> scratch;
  while (read_next(scratch)) {
  }
  reader_->threads_->remove(this);
  if (!error_.empty()) throw ReadError(error_);
  std::vector<const uint8_t*> row(outputs_.size());
  const std::lock_guard lock(reader_->mutex_);
  for (const size_t place : missing_) {
    for (size_t t = 0; t < outputs_.size(); ++t) row[t] = outputs_[t].get() + place * reader_->row_bytes(t);
    reader_->keep(distinct_[place], row.data());
  }
  missing_.clear();
}

}  // namespace moebius::files
