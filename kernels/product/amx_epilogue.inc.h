// From sums in memory to results: what follows the sum over k. Included INSIDE an anonymous namespace.

// What applies to the 16 columns of a panel after the sum.
struct PanelEnd {
  const float* column_scale;  // [16] or null
  const float* bias;          // [16] or null

  PanelEnd(const PanelLayout& layout, const std::byte* panel)
      : column_scale(layout.format.column_scale ? floats(panel + layout.column_scale_offset) : nullptr),
        bias(layout.has_bias ? floats(panel + layout.bias_offset) : nullptr) {}

  bool empty() const { return column_scale == nullptr && bias == nullptr; }

  // sum * (column_scale * row_scale) + bias: the order of the other instruction sets, so that int8 results agree.
  __m512 apply(__m512 sum, __m512 row_scale) const {
    __m512 scale = row_scale;
    if (column_scale != nullptr) scale = _mm512_mul_ps(scale, _mm512_loadu_ps(column_scale));
    sum = _mm512_mul_ps(sum, scale);
    return bias == nullptr ? sum : _mm512_add_ps(sum, _mm512_loadu_ps(bias));
  }

 private:
  static const float* floats(const std::byte* at) { return reinterpret_cast<const float*>(at); }
};

struct ResultBlock {
  float* first;      // row 0, column 0 of a panel
  size_t stride;     // floats
  uint32_t rows;
  float* at(uint32_t row) const { return first + row * stride; }
};

// float32 sums: nothing to do without column scale and bias.
struct FloatEnd {
  explicit FloatEnd(const ProductWork&) {}
  void finish(const ResultBlock& result, const PanelEnd& end, uint32_t /*first_row*/) const {
    if (end.empty()) return;
    for (uint32_t row = 0; row < result.rows; ++row) {
      _mm512_store_ps(result.at(row), end.apply(_mm512_load_ps(result.at(row)), _mm512_set1_ps(1.0f)));
    }
  }
  static __m512i add(__m512i left, __m512i right) {
    return _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(left), _mm512_castsi512_ps(right)));
  }
};

// int32 sums lie in the result until the last k: each row brings its scale.
struct Int32End {
  const float* row_scales;

  explicit Int32End(const ProductWork& work) : row_scales(work.row_scales) {}
  void finish(const ResultBlock& result, const PanelEnd& end, uint32_t first_row) const {
    for (uint32_t row = 0; row < result.rows; ++row) {
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(result.at(row)));
      _mm512_store_ps(result.at(row), end.apply(sum, _mm512_set1_ps(row_scales[first_row + row])));
    }
  }
  static __m512i add(__m512i left, __m512i right) { return _mm512_add_epi32(left, right); }
};
