#include "kernels/format/dequantise.h"

#include <stdexcept>
#include <string>

#include "kernels/format/pack_check.h"
#include "kernels/format/source_access.h"

namespace moebius {
namespace {

float value(Code code, uint32_t bits, uint32_t zero) {
  switch (code) {
    case Code::kFloat32: return std::bit_cast<float>(bits);
    case Code::kBFloat16: return decode_bfloat16(static_cast<uint16_t>(bits));
    case Code::kFloat16: return decode_float16(static_cast<uint16_t>(bits));
    case Code::kFloat8: return kFloat8Values[bits];
    case Code::kInt8: return static_cast<float>(static_cast<int8_t>(bits));
    case Code::kInt4: return static_cast<float>(static_cast<int32_t>(bits) - static_cast<int32_t>(zero));
    case Code::kFloat4: return kFloat4Values[bits];
  }
  return 0.0f;
}

}  // namespace

void dequantise_row(const SourceMatrix& source, uint32_t row, float* target) {
  check_source(source);
  if (row >= source.rows) {
    throw std::invalid_argument("row " + std::to_string(row) + " of a matrix of " + std::to_string(source.rows));
  }
  const float column_scale = source_column_scale(source, row);
  const uint32_t group_size = source.group_size == 0 ? source.cols : source.group_size;
  for (uint32_t k = 0; k < source.cols; ++k) {
    const uint32_t group = k / group_size;
    const float decoded = value(source.code, source_code(source, row, k), source_zero(source, row, group));
    target[k] = decoded * source_scale(source, row, group) * column_scale;
  }
}

}  // namespace moebius
