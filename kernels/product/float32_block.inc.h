// Rows times strips in registers. Included INSIDE an anonymous namespace, after Vec, the decoders and
// group_scales.inc.h.
//
// A strip is Vec::kLanes columns of a panel. kStrips strips and kRows rows are computed together; every row and column
// adds up its products in the same order whatever those numbers are, so a row's bits do not depend on the rows and
// panels it is computed with: two chains along k, their sum times the group's scale into the total.

constexpr uint32_t kStripsPerPanel = kPanelColumns / Vec::kLanes;

// Where strip number `strip` of a product lies.
struct Strip {
  const std::byte* panel;
  uint32_t column;  // of the panel, where the strip begins
};

[[gnu::always_inline]] inline Strip strip_of(const ProductWork& work, uint32_t strip) {
  return {work.panels + strip / kStripsPerPanel * work.layout->panel_bytes, strip % kStripsPerPanel * Vec::kLanes};
}

// The state of a block in registers; no function that is not inlined may see it.
template <class Decoder, int kRows, int kStrips>
struct Block {
  const Decoder decoder;
  const std::byte* at[kStrips];  // first unit of each strip
  const float* rows[kRows];
  Vec total[kStrips][kRows];
  Vec chains[kStrips][kRows][2];
  Vec zero[kStrips];

  [[gnu::always_inline]] Block(const ProductWork& work, uint32_t first_strip, uint32_t row)
      : decoder(work.layout->format) {
    for (int s = 0; s < kStrips; ++s) {
      const Strip strip = strip_of(work, first_strip + s);
      at[s] = strip.panel + strip.column * sizeof(uint32_t);
      for (int r = 0; r < kRows; ++r) total[s][r] = Vec::zero();
    }
    for (int r = 0; r < kRows; ++r) rows[r] = static_cast<const float*>(work.rows[row + r]);
  }

  [[gnu::always_inline]] void begin_group(const GroupBuffer* zeros, uint32_t slot) {
    for (int s = 0; s < kStrips; ++s) {
      zero[s] = Vec::load(zeros[s].lanes[slot]);
      for (int r = 0; r < kRows; ++r) chains[s][r][0] = chains[s][r][1] = Vec::zero();
    }
  }

  // Minimums times the sums of the rows' elements in the group.
  [[gnu::always_inline]] void add_minimums(const GroupBuffer* minimums, uint32_t slot, const float* row_sums,
                                           size_t stride) {
    for (int s = 0; s < kStrips; ++s) {
      const Vec minimum = Vec::load(minimums[s].lanes[slot]);
      for (int r = 0; r < kRows; ++r) {
        total[s][r] = Vec::fma(minimum, Vec::broadcast(row_sums[r * stride]), total[s][r]);
      }
    }
  }

  [[gnu::always_inline]] void end_group(const GroupBuffer* scales, uint32_t slot) {
    for (int s = 0; s < kStrips; ++s) {
      const Vec scale = Vec::load(scales[s].lanes[slot]);
      for (int r = 0; r < kRows; ++r) {
        total[s][r] = Vec::fma(scale, Decoder::finish(chains[s][r][0], chains[s][r][1]), total[s][r]);
      }
    }
  }

  // One unit of every strip, `offset` bytes into the codes, and the rows' elements from k; fetches `ahead` bytes on.
  template <int... kSteps>
  [[gnu::always_inline]] void multiply_unit(size_t offset, size_t k, size_t ahead,
                                            std::integer_sequence<int, kSteps...>) {
    typename Decoder::Unit units[kStrips];
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      const std::byte* const source = at[s] + offset;
      for (uint32_t line = 0; line < Decoder::kUnitBytes && s % kStripsPerPanel == 0; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(source + ahead + line), _MM_HINT_T0);
      }
      units[s] = decoder.load(source, zero[s]);
    }
    if constexpr (Decoder::kRareCodes) {
      if (Decoder::any_rare(units)) [[unlikely]] {
        (multiply_step<kSteps, true>(units, k), ...);
        return;
      }
    }
    (multiply_step<kSteps, false>(units, k), ...);
  }

  // An element of a row serves all strips at once: kept for longer, it would need a register of its own.
  template <int kStep, bool kRare>
  [[gnu::always_inline]] void multiply_step(const typename Decoder::Unit (&units)[kStrips], size_t k) {
    Vec values[kStrips];
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      values[s] = decoder.template value<kStep>(units[s]);
      if constexpr (kRare) values[s] = Decoder::repair(values[s]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Vec element = Decoder::template row<kStep>(rows[r] + k);
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) {
        chains[s][r][kStep % 2] = Vec::fma(element, values[s], chains[s][r][kStep % 2]);
      }
    }
  }

  [[gnu::always_inline]] void store(const ProductWork& work, uint32_t first_strip, uint32_t row) const {
    const PanelLayout& layout = *work.layout;
    for (int s = 0; s < kStrips; ++s) {
      const Strip strip = strip_of(work, first_strip + s);
      const auto* const column_scale = reinterpret_cast<const float*>(strip.panel + layout.column_scale_offset);
      const auto* const bias = reinterpret_cast<const float*>(strip.panel + layout.bias_offset);
      float* const target = work.result + row * work.result_stride + size_t{first_strip + s} * Vec::kLanes;
      for (int r = 0; r < kRows; ++r) {
        Vec result = total[s][r];
        if (layout.format.column_scale) result = Vec::mul(result, Vec::load(column_scale + strip.column));
        if (layout.has_bias) result = Vec::add(result, Vec::load(bias + strip.column));
        result.store(target + r * work.result_stride);
      }
    }
  }
};
