#include "kernels/format/dequantise.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/format/codebooks.h"
#include "kernels/format/pack.h"
#include "kernels/format/panel_values.h"
#include "kernels/format/source_access.h"

namespace moebius {
namespace {

// The two elements of a byte, low nibble first.
using NibblePairs = std::array<std::array<float, 2>, 256>;

constexpr NibblePairs make_pairs(const std::array<float, 16>& values) {
  NibblePairs pairs{};
  for (uint32_t byte = 0; byte < 256; ++byte) pairs[byte] = {values[byte & 15], values[byte >> 4]};
  return pairs;
}

constexpr std::array<float, 16> kCodes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr NibblePairs kInt4Pairs = make_pairs(kCodes);
constexpr NibblePairs kFloat4Pairs = make_pairs(kFloat4Values);

float float32_value(float value) { return value; }
float float8_value(uint8_t bits) { return kFloat8Values[bits]; }
float int8_value(int8_t value) { return static_cast<float>(value); }
float int4_value(uint8_t code) { return kCodes[code & 15]; }
float float4_value(uint8_t code) { return kFloat4Values[code & 15]; }

template <class T, float (*kValue)(T)>
void decode_plain(const SourceMatrix& source, uint32_t row, uint32_t begin, uint32_t count, float* target) {
  const ptrdiff_t stride = source.col_stride;
  const ptrdiff_t first = static_cast<ptrdiff_t>(row) * source.row_stride + static_cast<ptrdiff_t>(begin) * stride;
  const auto* elements = static_cast<const std::byte*>(source.data) + first * static_cast<ptrdiff_t>(sizeof(T));
  if (stride == 1) {
    for (uint32_t i = 0; i < count; ++i) target[i] = kValue(load_element<T>(elements, i));
    return;
  }
  for (uint32_t i = 0; i < count; ++i) target[i] = kValue(load_element<T>(elements, i * stride));
}

// Codes of fewer than 8 bits, one a byte: the values that their bits stand for before anything is subtracted.
void decode_small(const SourceMatrix& source, uint32_t row, uint32_t begin, uint32_t count, float* target) {
  const bool tabled = source.code >= Code::kIq4;
  const Codebook& book = *kCodebooks[tabled ? static_cast<int>(source.code) - static_cast<int>(Code::kIq4) : 0];
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t code = source_code(source, row, begin + i);
    target[i] = tabled ? static_cast<float>(book.values[code]) * book.unit : static_cast<float>(code);
  }
}

void decode_plain_row(const SourceMatrix& source, uint32_t row, uint32_t begin, uint32_t count, float* target) {
  switch (source.code) {
    case Code::kFloat32: return decode_plain<float, float32_value>(source, row, begin, count, target);
    case Code::kBFloat16: return decode_plain<uint16_t, decode_bfloat16>(source, row, begin, count, target);
    case Code::kFloat16: return decode_plain<uint16_t, decode_float16>(source, row, begin, count, target);
    case Code::kFloat8: return decode_plain<uint8_t, float8_value>(source, row, begin, count, target);
    case Code::kInt8: return decode_plain<int8_t, int8_value>(source, row, begin, count, target);
    case Code::kInt4: return decode_plain<uint8_t, int4_value>(source, row, begin, count, target);
    case Code::kFloat4: return decode_plain<uint8_t, float4_value>(source, row, begin, count, target);
    default: return decode_small(source, row, begin, count, target);
  }
}

void decode_bytes(const NibblePairs& pairs, const std::byte* bytes, uint32_t count, float* target) {
  for (uint32_t i = 0; i + 2 <= count; i += 2) std::memcpy(target + i, &pairs[load_element<uint8_t>(bytes, i / 2)], 8);
  if (count % 2 != 0) target[count - 1] = pairs[load_element<uint8_t>(bytes, count / 2)][0];
}

// Words of eight k, one source row after the other.
void decode_gptq(const SourceMatrix& source, uint32_t row, uint32_t begin, uint32_t count, float* target) {
  uint32_t k = begin;
  const uint32_t end = begin + count;
  for (; k < end && k % 8 != 0; ++k) *target++ = kCodes[source_code(source, row, k)];
  for (; k + 8 <= end; k += 8, target += 8) {
    const ptrdiff_t word = static_cast<ptrdiff_t>(k / 8) * source.row_stride + static_cast<ptrdiff_t>(row);
    decode_bytes(kInt4Pairs, static_cast<const std::byte*>(source.data) + word * 4, 8, target);
  }
  for (; k < end; ++k) *target++ = kCodes[source_code(source, row, k)];
}

void decode_awq(const SourceMatrix& source, uint32_t row, uint32_t begin, uint32_t count, float* target) {
  const ptrdiff_t stride = source.row_stride;
  const uint32_t nibble = kAwqNibbles[row % 8];
  const ptrdiff_t first = static_cast<ptrdiff_t>(begin) * stride + static_cast<ptrdiff_t>(row / 8);
  for (uint32_t i = 0; i < count; ++i) target[i] = kCodes[load_nibble(source.data, first + i * stride, nibble)];
}

void decode_grid(const SourceMatrix& source, uint32_t row, uint32_t begin, uint32_t count, float* target) {
  const uint32_t step = grid_source_words(source.code);
  const uint32_t more = sign_bytes(source.code) == 0 ? 0 : code_bits(source.code);
  const auto* const words =
      static_cast<const uint32_t*>(source.data) + static_cast<ptrdiff_t>(row) * source.row_stride;
  for (uint32_t k = begin; k < begin + count; ++k) {
    const uint32_t* const of_k = words + k / 32 * step;
    *target++ = grid_value(source.code, of_k, 1, of_k[more], k);
  }
}

}  // namespace

void decode_codes(const SourceMatrix& source, uint32_t row, uint32_t begin, uint32_t count, float* target) {
  const auto unit = static_cast<ptrdiff_t>(source_unit_bytes(source));
  const auto* bytes =
      static_cast<const std::byte*>(source.data) + static_cast<ptrdiff_t>(row) * source.row_stride * unit + begin / 2;
  switch (source.layout) {
    case SourceLayout::kPlain: return decode_plain_row(source, row, begin, count, target);
    case SourceLayout::kAwqInt4: return decode_awq(source, row, begin, count, target);
    case SourceLayout::kGptqInt4: return decode_gptq(source, row, begin, count, target);
    case SourceLayout::kCompressedInt4: return decode_bytes(kInt4Pairs, bytes, count, target);
    case SourceLayout::kGridWords: return decode_grid(source, row, begin, count, target);
    case SourceLayout::kMxfp4:
    case SourceLayout::kNvfp4: return decode_bytes(kFloat4Pairs, bytes, count, target);
  }
}

namespace {

// Products with a scale that is not there are left out: they would be products with 1.
void scale_elements(float factor, uint32_t count, float* target) {
  for (uint32_t i = 0; i < count; ++i) target[i] *= factor;
}

void add_min(float minimum, uint32_t count, float* target) {
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
  if (code_middle(source.code) != 0 && source.mins == nullptr) {
    subtract_zero(source_zero(source, row, group), count, target);
  }
  if (source.group_size != 0) scale_elements(source_scale(source, row, group), count, target);
  if (source.mins != nullptr) add_min(source_min(source, row, group), count, target);
  const float column_scale = source_column_scale(source, row);
  if (column_scale != 1.0f) scale_elements(column_scale, count, target);
}

}  // namespace

void dequantise_rows(const SourceMatrix& source, uint32_t first, uint32_t count, float* target, size_t stride) {
  check_source(source);
  if (source.order != nullptr) throw std::invalid_argument("the columns are sorted: they can only be packed exactly");
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
