#include "kernels/format/dequantise.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels/format/decode_codes.h"
#include "kernels/format/pack_check.h"
#include "kernels/format/source_access.h"

namespace moebius {
namespace {

// Products with a scale that is not there are left out: they would be products with 1.
void scale_elements(float factor, uint32_t count, float* target) {
  for (uint32_t i = 0; i < count; ++i) target[i] *= factor;
}

void add_minimum(float minimum, uint32_t count, float* target) {
  for (uint32_t i = 0; i < count; ++i) target[i] += minimum;
}

void subtract_zero(uint32_t zero, uint32_t count, float* target) {
  const auto point = static_cast<float>(zero);
  for (uint32_t i = 0; i < count; ++i) target[i] -= point;
}

// Rows that lie side by side in memory are decoded some columns at a time, while their cache lines are near.
constexpr uint32_t kNearColumns = 64;

bool rows_share_cache_lines(const SourceMatrix& source) {
  if (source.layout == SourceLayout::kAwqInt4 || source.layout == SourceLayout::kGptqInt4) return true;
  return source.layout == SourceLayout::kPlain && std::abs(source.row_stride) < std::abs(source.col_stride);
}

// Columns begin ... begin + count - 1, within one group.
void dequantise_run(const SourceMatrix& source, uint32_t row, uint32_t begin, uint32_t count, float* target) {
  decode_codes(source, row, begin, count, target);
  const uint32_t group = source.group_size == 0 ? 0 : begin / source.group_size;
  if (source.code == Code::kInt4 && source.minimums == nullptr) {
    subtract_zero(source_zero(source, row, group), count, target);
  }
  if (source.group_size != 0) scale_elements(source_scale(source, row, group), count, target);
  if (source.minimums != nullptr) add_minimum(source_minimum(source, row, group), count, target);
  const float column_scale = source_column_scale(source, row);
  if (column_scale != 1.0f) scale_elements(column_scale, count, target);
}

}  // namespace

void dequantise_rows(const SourceMatrix& source, uint32_t first, uint32_t count, float* target, size_t stride) {
  check_source(source);
  if (first >= source.rows || count > source.rows - first) {
    throw std::invalid_argument(std::to_string(count) + " rows from " + std::to_string(first) + " on of a matrix of " +
                                std::to_string(source.rows));
  }
  const bool near = rows_share_cache_lines(source);
  const uint32_t run = source.group_size != 0 ? source.group_size : near ? kNearColumns : source.cols;
  const uint32_t together = near ? count : 1;
  for (uint32_t row = 0; row < count; row += together) {
    for (uint32_t begin = 0; begin < source.cols; begin += run) {
      const uint32_t elements = std::min(run, source.cols - begin);
      for (uint32_t i = row; i < row + together; ++i) {
        dequantise_run(source, first + i, begin, elements, target + i * stride + begin);
      }
    }
  }
}

void dequantise_row(const SourceMatrix& source, uint32_t row, float* target) {
  dequantise_rows(source, row, 1, target, source.cols);
}

}  // namespace moebius
