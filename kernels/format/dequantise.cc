#include "kernels/format/dequantise.h"

#include <algorithm>
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

void subtract_zero(uint32_t zero, uint32_t count, float* target) {
  const auto point = static_cast<float>(zero);
  for (uint32_t i = 0; i < count; ++i) target[i] -= point;
}

}  // namespace

void dequantise_row(const SourceMatrix& source, uint32_t row, float* target) {
  check_source(source);
  if (row >= source.rows) {
    throw std::invalid_argument("row " + std::to_string(row) + " of a matrix of " + std::to_string(source.rows));
  }
  const uint32_t group_size = source.group_size == 0 ? source.cols : source.group_size;
  const float column_scale = source_column_scale(source, row);
  for (uint32_t begin = 0; begin < source.cols; begin += group_size) {
    const uint32_t group = begin / group_size;
    const uint32_t count = std::min(group_size, source.cols - begin);
    float* const elements = target + begin;
    decode_codes(source, row, begin, count, elements);
    if (source.code == Code::kInt4) subtract_zero(source_zero(source, row, group), count, elements);
    if (source.group_size != 0) scale_elements(source_scale(source, row, group), count, elements);
    if (column_scale != 1.0f) scale_elements(column_scale, count, elements);
  }
}

}  // namespace moebius
