// A request's (row, expert) pairs, grouped by expert.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moebius {

// Filled by group() from ids and weights; reused from call to call so that no call allocates for long.
// Pairs of one expert are contiguous, in ascending row order; experts ascend.
struct RowGroups {
  struct Group {
    uint32_t expert;  // local index
    uint32_t begin;   // first pair
    uint32_t rows;    // number of pairs, > 0
  };
  static constexpr uint32_t kNoPair = UINT32_MAX;

  std::vector<Group> groups;         // experts that were chosen
  std::vector<uint32_t> pair_rows;   // [pairs] row of the request
  std::vector<float> pair_weights;   // [pairs] router weight
  std::vector<uint32_t> pair_of;     // [rows, top_k] pair of a row's choice; kNoPair where it was skipped

  size_t num_pairs() const { return pair_rows.size(); }

  // Counting sort of topk_ids [rows, top_k]; ids outside [expert_begin, expert_begin + num_experts) are
  // another server's, or -1, and are skipped.
  void group(const int32_t* topk_ids, const float* topk_weights, uint32_t rows, uint32_t top_k, uint32_t expert_begin,
             uint32_t num_experts);

 private:
  std::vector<uint32_t> counts_;
};

}  // namespace moebius
