// W8A8: int8 rows times int8 codes, summed exactly in int32. Included INSIDE an anonymous namespace, after Vec and
// an `Integers` of Vec::kLanes int32 lanes. |sum| stays below 2^31 for k up to 2^17.
//
// Codes are widened to pairs of 16 bits, (k, k+2) and (k+1, k+3) of each column's word; rows are widened once per
// call into the same order, so that one multiply-add takes two products.

// Pairs of int16 as 32 bits: [k_padded / 2] per row, (k, k+2), (k+1, k+3), (k+4, k+6), ...
void widen_row(const int8_t* row, uint32_t k_padded, uint32_t* target) {
  for (uint32_t k = 0; k < k_padded; k += 4, target += 2) {
    for (int i = 0; i < 2; ++i) {
      const auto low = static_cast<uint16_t>(static_cast<int16_t>(row[k + i]));
      const auto high = static_cast<uint16_t>(static_cast<int16_t>(row[k + i + 2]));
      target[i] = low | static_cast<uint32_t>(high) << 16;
    }
  }
}

constexpr int kInt8MaxRows = 4;

template <int kRows>
void multiply_int8(const GemmWork& work, uint32_t strip, uint32_t row) {
  const PanelLayout& layout = *work.layout;
  const uint32_t column = strip % kStripsPerPanel * Vec::kLanes;
  const std::byte* const panel = work.panels + strip / kStripsPerPanel * layout.panel_bytes;
  const std::byte* const codes = panel + column * sizeof(uint32_t);
  const size_t row_pairs = layout.k_padded / 2;
  const uint32_t* const pairs = reinterpret_cast<const uint32_t*>(work.scratch) + row * row_pairs;
  Integers even[kRows], odd[kRows];
  for (int r = 0; r < kRows; ++r) even[r] = odd[r] = Integers::zero();
  for (uint32_t word = 0; word < (layout.k + 3) / 4; ++word) {
    const std::byte* const at = codes + size_t{word} * 64;
    _mm_prefetch(reinterpret_cast<const char*>(at + kPrefetchBytes), _MM_HINT_T0);
    const Integers words = Integers::load(at);
    const Integers even_codes = words.even_bytes(), odd_codes = words.odd_bytes();
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const uint32_t* const pair = pairs + r * row_pairs + size_t{word} * 2;
      even[r] = Integers::multiply_add(even_codes, Integers::broadcast(pair[0]), even[r]);
      odd[r] = Integers::multiply_add(odd_codes, Integers::broadcast(pair[1]), odd[r]);
    }
  }
  const Vec column_scale = Vec::load(reinterpret_cast<const float*>(panel + layout.column_scale_offset) + column);
  const auto* const bias = reinterpret_cast<const float*>(panel + layout.bias_offset) + column;
  for (int r = 0; r < kRows; ++r) {
    const Vec scale = Vec::mul(column_scale, Vec::broadcast(work.row_scales[row + r]));
    Vec result = Vec::mul(Integers::add(even[r], odd[r]).to_float(), scale);
    if (layout.has_bias) result = Vec::add(result, Vec::load(bias));
    result.store(work.result + (row + r) * work.result_stride + size_t{strip} * Vec::kLanes);
  }
}

void run_int8(const GemmWork& work) {
  using Multiply = void (*)(const GemmWork&, uint32_t, uint32_t);
  static constexpr Multiply kTable[] = {multiply_int8<1>, multiply_int8<2>, multiply_int8<3>, multiply_int8<4>};
  const size_t row_pairs = work.layout->k_padded / 2;
  uint32_t* const pairs = reinterpret_cast<uint32_t*>(work.scratch);
  for (uint32_t row = 0; row < work.num_rows; ++row) {
    widen_row(static_cast<const int8_t*>(work.rows[row]), work.layout->k_padded, pairs + row * row_pairs);
  }
  for (uint32_t strip = 0; strip < work.num_panels * kStripsPerPanel; ++strip) {
    for (uint32_t row = 0; row < work.num_rows; row += kInt8MaxRows) {
      const uint32_t left = work.num_rows - row;
      kTable[(left < kInt8MaxRows ? left : kInt8MaxRows) - 1](work, strip, row);
    }
  }
}

bool supports_int8(const WeightFormat& format) {
  return format.code == Code::kInt8 && format.quantised_rows && format.column_scale && format.group_size == 0;
}

size_t scratch_int8(const PanelLayout& layout, uint32_t, uint32_t num_rows) {
  return size_t{layout.k_padded} * 2 * num_rows;
}
