#include "kernels/moe/row_groups.h"

namespace moebius {

void RowGroups::group(const int32_t* topk_ids, const float* topk_weights, uint32_t rows, uint32_t top_k,
                      uint32_t expert_begin, uint32_t num_experts) {
  const size_t pairs = static_cast<size_t>(rows) * top_k;
  // Unsigned distance: ids below expert_begin wrap around and are out of range too.
  auto local = [&](size_t pair) { return static_cast<uint32_t>(topk_ids[pair]) - expert_begin; };
  counts_.assign(num_experts, 0);
  for (size_t pair = 0; pair < pairs; ++pair) {
    const uint32_t expert = local(pair);
    if (topk_ids[pair] >= 0 && expert < num_experts) ++counts_[expert];
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
  for (size_t pair = 0; pair < pairs; ++pair) {
    const uint32_t expert = local(pair);
    if (topk_ids[pair] < 0 || expert >= num_experts) continue;
    const uint32_t position = counts_[expert]++;
    pair_rows[position] = static_cast<uint32_t>(pair / top_k);
    pair_weights[position] = topk_weights[pair];
  }
}

}  // namespace moebius
