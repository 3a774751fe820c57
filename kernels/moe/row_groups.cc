#include "kernels/moe/row_groups.h"

namespace moebius {

void RowGroups::group(const int32_t* topk_ids, const float* topk_weights, uint32_t rows, uint32_t top_k,
                      uint32_t expert_begin, uint32_t num_experts) {
  const size_t choices = static_cast<size_t>(rows) * top_k;
  // Unsigned distance: ids below expert_begin wrap around and are out of range too.
  auto local = [&](size_t choice) { return static_cast<uint32_t>(topk_ids[choice]) - expert_begin; };
  counts_.assign(num_experts, 0);
  for (size_t choice = 0; choice < choices; ++choice) {
    const uint32_t expert = local(choice);
    if (topk_ids[choice] >= 0 && expert < num_experts) ++counts_[expert];
  }
  groups.clear();
  uint32_t total = 0;
  for (uint32_t expert = 0; expert < num_experts; ++expert) {
    const uint32_t count = counts_[expert];
    if (count > 0) groups.push_back({expert, total, count});
    counts_[expert] = total;  // from here on: where the expert's next pair goes
    total += count;
  }
  pair_rows.resize(total);
  pair_weights.resize(total);
  pair_of.assign(choices, kNoPair);
  for (size_t choice = 0; choice < choices; ++choice) {
    const uint32_t expert = local(choice);
    if (topk_ids[choice] < 0 || expert >= num_experts) continue;
    const uint32_t position = counts_[expert]++;
    pair_rows[position] = static_cast<uint32_t>(choice / top_k);
    pair_weights[position] = topk_weights[choice];
    pair_of[choice] = position;
  }
}

}  // namespace moebius
