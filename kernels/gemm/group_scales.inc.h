// Group scales and zero points -> float32, a few groups at a time. Included INSIDE an anonymous namespace, after Vec.

// 2^-8 times the value of an e4m3 code was built by putting its bits into a wider exponent, which is wrong where the
// code is subnormal (2^-15 * (1 + m/8) instead of 2^-14 * m/8) or NaN (1.875).
[[gnu::always_inline]] inline Vec fix_float8(Vec value) {
  const Vec magnitude = Vec::abs(value);
  const Vec smallest_normal = Vec::broadcast(0x1p-14f);
  const Vec subnormal = Vec::sub(Vec::add(value, value), Vec::copy_sign(smallest_normal, value));
  const Vec finite = Vec::where_less(magnitude, smallest_normal, subnormal, value);
  return Vec::where_equal(magnitude, Vec::broadcast(1.875f), Vec::broadcast(__builtin_nanf("")), finite);
}

constexpr uint32_t kGroupsAtOnce = 8;

// kLanes columns of kGroupsAtOnce groups.
struct GroupBuffer {
  alignas(64) float lanes[kGroupsAtOnce][Vec::kLanes];
};

constexpr uint32_t bytes_of(ScaleType type) {
  constexpr uint32_t kBytes[] = {0, 4, 2, 2, 1, 1, 1};
  return kBytes[static_cast<int>(type)];
}

[[gnu::always_inline]] inline Vec decode_scales(ScaleType type, const std::byte* at) {
  switch (type) {
    case ScaleType::kNone: return Vec::broadcast(1.0f);
    case ScaleType::kFloat32: return Vec::load(reinterpret_cast<const float*>(at));
    case ScaleType::kBFloat16: return Vec::from_bfloat16(at);
    case ScaleType::kFloat16: return Vec::from_float16(at);
    case ScaleType::kE8M0: return Vec::from_e8m0_codes(Vec::load_bytes(at));
    case ScaleType::kE4M3: return Vec::from_float8(at);
    case ScaleType::kProducts: break;  // no element stands alone: widen_products
  }
  return Vec::zero();
}

template <ScaleType kType>
void widen_columns(const std::byte* at, uint32_t count, GroupBuffer* target) {
  for (uint32_t group = 0; group < count; ++group) {
    decode_scales(kType, at + group * (kPanelColumns * bytes_of(kType))).store(target->lanes[group]);
  }
}

// One scale for all columns. Decoding a whole vector in place would read past the panel's scales.
template <ScaleType kType>
void widen_panel_scales(const std::byte* at, uint32_t count, GroupBuffer* target) {
  alignas(64) std::byte one[64] = {};
  for (uint32_t group = 0; group < count; ++group) {
    alignas(64) float decoded[Vec::kLanes];
    if constexpr (kType == ScaleType::kFloat32) {
      __builtin_memcpy(decoded, at + group * sizeof(float), sizeof(float));
    } else {
      __builtin_memcpy(one, at + group * bytes_of(kType), bytes_of(kType));
      decode_scales(kType, one).store(decoded);
    }
    Vec::broadcast(decoded[0]).store(target->lanes[group]);
  }
}

// Of rows of a grid: factors that several groups share, and the last of each group's lines.
template <int kBits>
void widen_grid_products(const PanelLayout& layout, const std::byte* panel, uint32_t column, uint32_t group,
                         uint32_t count, GroupBuffer* target) {
  const std::byte* const factors = panel + layout.scales_offset + size_t{column} * 2;
  const std::byte* line = panel + (size_t{group + 1} * kBits - 1) * 64 + column * 4;
  for (uint32_t i = 0; i < count; ++i, line += kBits * 64) {
    const Vec factor = Vec::from_float16(factors + size_t{(group + i) / layout.factor_groups} * kPanelColumns * 2);
    Vec::mul(factor, Vec::from_top_bits(line)).store(target->lanes[i]);
  }
}

// Of tq1: factors alone.
void widen_factors(const PanelLayout& layout, const std::byte* panel, uint32_t column, uint32_t group, uint32_t count,
                   GroupBuffer* target) {
  const std::byte* const factors = panel + layout.scales_offset + size_t{column} * 2;
  for (uint32_t i = 0; i < count; ++i) {
    const size_t line = (group + i) / layout.factor_groups;
    Vec::from_float16(factors + line * kPanelColumns * 2).store(target->lanes[i]);
  }
}

// Of iq1_s: factors that several groups share, and three bits of each group's signs.
void widen_iq1_s_products(const PanelLayout& layout, const std::byte* panel, uint32_t column, uint32_t group,
                          uint32_t count, GroupBuffer* target) {
  const std::byte* const factors = panel + layout.scales_offset + size_t{column} * 2;
  const std::byte* signs = panel + layout.signs_offset + (size_t{group} * kPanelColumns + column) * 2;
  for (uint32_t i = 0; i < count; ++i, signs += kPanelColumns * 2) {
    const Vec factor = Vec::from_float16(factors + size_t{(group + i) / layout.factor_groups} * kPanelColumns * 2);
    Vec::mul(factor, Vec::from_iq1_s(signs)).store(target->lanes[i]);
  }
}

// Of a group of eight that begin at multiples of eight: its whole number of kLowBits and kHighBits, times its factor.
template <int kLowBits, int kHighBits, bool kOfGrid, int kGroup>
[[gnu::always_inline]] inline void widen_field(const std::byte* low, const std::byte* high, Vec factor, float* target) {
  constexpr uint32_t kLow = kGroup * kLowBits / 8 * kPanelColumns, kHigh = kGroup * kHighBits / 8 * kPanelColumns;
  const auto whole = Vec::whole_field<kLowBits, kHighBits, kGroup>(low + kLow, high + kHigh);
  const Vec number = kOfGrid ? Vec::twice_and_one(whole) : Vec::less(whole, 1 << (kLowBits + kHighBits - 1));
  Vec::mul(factor, number).store(target);
}

// Whole numbers of fewer than 8 bits, in two planes of bytes.
template <int kLowBits, int kHighBits, bool kOfGrid>
void widen_field_products(const PanelLayout& layout, const std::byte* panel, uint32_t column, uint32_t group,
                          uint32_t count, GroupBuffer* target) {
  const std::byte* const section = panel + layout.scales_offset;
  const std::byte* const low = section + layout.whole_offset + column;
  const std::byte* const high = section + layout.whole_high_offset + column;
  const std::byte* const factors = section + size_t{column} * 2;
  const auto shift = static_cast<uint32_t>(__builtin_ctz(layout.factor_groups));
  for (uint32_t i = 0; i < count; ++i, ++group) {
    const Vec factor = Vec::from_float16(factors + size_t{group >> shift} * kPanelColumns * 2);
    const std::byte* const low_of_8 = low + size_t{group / 8 * kLowBits} * kPanelColumns;
    const std::byte* const high_of_8 = high + size_t{group / 8 * kHighBits} * kPanelColumns;
    float* const lanes = target->lanes[i];
    switch (group % 8) {
      case 0: widen_field<kLowBits, kHighBits, kOfGrid, 0>(low_of_8, high_of_8, factor, lanes); break;
      case 1: widen_field<kLowBits, kHighBits, kOfGrid, 1>(low_of_8, high_of_8, factor, lanes); break;
      case 2: widen_field<kLowBits, kHighBits, kOfGrid, 2>(low_of_8, high_of_8, factor, lanes); break;
      case 3: widen_field<kLowBits, kHighBits, kOfGrid, 3>(low_of_8, high_of_8, factor, lanes); break;
      case 4: widen_field<kLowBits, kHighBits, kOfGrid, 4>(low_of_8, high_of_8, factor, lanes); break;
      case 5: widen_field<kLowBits, kHighBits, kOfGrid, 5>(low_of_8, high_of_8, factor, lanes); break;
      case 6: widen_field<kLowBits, kHighBits, kOfGrid, 6>(low_of_8, high_of_8, factor, lanes); break;
      default: widen_field<kLowBits, kHighBits, kOfGrid, 7>(low_of_8, high_of_8, factor, lanes); break;
    }
  }
}

// Factors that several groups share, then int8 of each.
void widen_products(const PanelLayout& layout, const std::byte* panel, bool of_mins, uint32_t column, uint32_t group,
                    uint32_t count, GroupBuffer* target) {
  const Code code = layout.format.code;
  if (code == Code::kIq3Xxs) return widen_grid_products<3>(layout, panel, column, group, count, target);
  if (code == Code::kIq2Xxs) return widen_grid_products<2>(layout, panel, column, group, count, target);
  if (code == Code::kTq1) return widen_factors(layout, panel, column, group, count, target);
  if (code == Code::kIq1S) return widen_iq1_s_products(layout, panel, column, group, count, target);
  if (code == Code::kIq1M) return widen_field_products<2, 1, true>(layout, panel, column, group, count, target);
  if (code == Code::kInt3) return widen_field_products<4, 2, false>(layout, panel, column, group, count, target);
  if (layout.whole_low_bits != 0) return widen_field_products<4, 0, true>(layout, panel, column, group, count, target);
  const std::byte* const factors = panel + (of_mins ? layout.mins_offset : layout.scales_offset);
  const std::byte* whole = (layout.joined ? panel + layout.scales_offset : factors) + layout.whole_offset;
  whole += size_t{group} * kPanelColumns + column;
  for (uint32_t i = 0; i < count; ++i, whole += kPanelColumns) {
    const uint32_t line = (group + i) / layout.factor_groups;
    const Vec factor = Vec::from_float16(factors + (size_t{line} * kPanelColumns + column) * 2);
    alignas(16) uint8_t parts[kPanelColumns];
    if (layout.joined) {
      for (uint32_t lane = 0; lane < Vec::kLanes; ++lane) {
        const auto both = static_cast<uint8_t>(whole[lane]);
        parts[lane] = of_mins ? both >> 4 : both & 15;
      }
    }
    const void* const read = layout.joined ? static_cast<const void*>(parts) : whole;
    Vec::mul(factor, Vec::from_signed_bytes(read)).store(target->lanes[i]);
  }
}

template <ScaleType kType>
void widen(const PanelLayout& layout, const std::byte* scales, uint32_t column, uint32_t group, uint32_t count,
           GroupBuffer* target) {
  if (layout.format.panel_scale) return widen_panel_scales<kType>(scales + group * bytes_of(kType), count, target);
  widen_columns<kType>(scales + (size_t{group} * kPanelColumns + column) * bytes_of(kType), count, target);
}

// Scales or mins of `count` groups from `group`, for the kLanes columns from `column` of a panel.
[[gnu::noinline]] void widen_scales(const PanelLayout& layout, const std::byte* panel, bool of_mins, uint32_t column,
                                    uint32_t group, uint32_t count, GroupBuffer* target) {
  const std::byte* const scales = panel + (of_mins ? layout.mins_offset : layout.scales_offset);
  switch (layout.format.scale) {
    case ScaleType::kNone: return widen<ScaleType::kNone>(layout, scales, column, group, count, target);
    case ScaleType::kFloat32: return widen<ScaleType::kFloat32>(layout, scales, column, group, count, target);
    case ScaleType::kBFloat16: return widen<ScaleType::kBFloat16>(layout, scales, column, group, count, target);
    case ScaleType::kFloat16: return widen<ScaleType::kFloat16>(layout, scales, column, group, count, target);
    case ScaleType::kE8M0: return widen<ScaleType::kE8M0>(layout, scales, column, group, count, target);
    case ScaleType::kE4M3: return widen<ScaleType::kE4M3>(layout, scales, column, group, count, target);
    case ScaleType::kProducts: return widen_products(layout, panel, of_mins, column, group, count, target);
  }
}

[[gnu::noinline]] void widen_zeros(const PanelLayout& layout, const std::byte* panel, uint32_t column, uint32_t group,
                                   uint32_t count, GroupBuffer* target) {
  const std::byte* at = panel + layout.zeros_offset + size_t{group} * kPanelColumns + column;
  for (uint32_t i = 0; i < count; ++i, at += kPanelColumns) Vec::from_unsigned_bytes(at).store(target->lanes[i]);
}
