// bfloat16 rows times a panel of codes with group scales, as products of 16-bit integers. Included INSIDE an anonymous
// namespace, after Vec, an `Integers` of Vec::kLanes int32 lanes, the decoders and float32_gemm.inc.h.
//
// A group of a row becomes integers of 15 bits and a sign, times a power of two: values down to 1/128 of the group's
// largest are exact, smaller ones are off by at most 2^-15 of it, values below 2^-112 are zero. A group with a NaN or
// infinity gets a NaN scale, so that its results are NaN. Codes become integers of 16 bits in one operation or two
// for 16 of them, less than a float32 takes, and one operation multiplies 16 and adds neighbours. Sums of a group are
// exact: below 2^31, for 128 products of 127 and 2^15. They become float32 with the row's and the group's scales, so
// a row's bits do not depend on the rows and panels that it is computed with.

struct WordRow {
  const uint32_t* pairs;   // [k_padded / 2]
  const float* scales;     // [groups]
  const float* sums;       // [groups] with mins: the group's sum as a number
  const int32_t* offsets;  // [groups] in their place, without: the group's sum of integers times the codes' middle
};

size_t word_row_bytes(const PanelLayout& layout) {
  return (size_t{layout.k_padded} * 2 + size_t{layout.groups} * 8 + 63) / 64 * 64;
}

WordRow word_row_at(const PanelLayout& layout, const void* prepared) {
  const auto* const pairs = static_cast<const uint32_t*>(prepared);
  const auto* const scales = reinterpret_cast<const float*>(pairs + layout.k_padded / 2);
  const float* const sums = scales + layout.groups;
  return {pairs, scales, sums, reinterpret_cast<const int32_t*>(sums)};
}

// --- Codes to pairs of 16 bits. Step j of a unit is a pair of k for each column, number kPair[j] of the unit's.

// Codes of 8 bits: pairs (k, k+2) and (k+1, k+3), in which order rows are prepared, also of rows of a grid.
struct Int8Words {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 4;
  static constexpr uint32_t kPair[] = {0, 1};
  explicit Int8Words(const PanelLayout&) {}

  struct Unit {
    Integers words;
  };
  static Unit load(const std::byte* at, size_t) { return {Integers::load(at)}; }
  template <int j>
  static Integers step(const Unit& unit) {
    return j == 0 ? unit.words.even_bytes() : unit.words.odd_bytes();
  }
};

// Codes of 4 bits as they are, from 0 to 15.
struct Int4Words {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 8;
  static constexpr uint32_t kPair[] = {0, 1, 2, 3};
  explicit Int4Words(const PanelLayout&) {}

  struct Unit {
    Integers words;
  };
  static Unit load(const std::byte* at, size_t) { return {Integers::load(at)}; }
  template <int j>
  static Integers step(const Unit& unit) {
    return unit.words.template nibbles<j>();
  }
};

// Codes of which a decoder makes signed bytes, two vectors for 8 k: k+0, 4, 1, 5, then k+2, 6, 3, 7.
template <class Bytes, int kVectors>
struct ByteWords {
  static constexpr uint32_t kUnitBytes = Bytes::kUnitBytes;
  static constexpr uint32_t kUnitK = Bytes::kUnitK;
  static constexpr uint32_t kPair[] = {0, 2, 1, 3, 4, 6, 5, 7};
  explicit ByteWords(const PanelLayout& layout) : bytes(layout) {}

  struct Unit {
    Integers vectors[kVectors];
  };
  Unit load(const std::byte* at, size_t k) const {
    const auto unit = bytes.load(at, k, Vec::zero());
    if constexpr (kVectors == 2) {
      return {{unit.low, unit.high}};
    } else {
      return {{unit.vectors[0], unit.vectors[1], unit.vectors[2], unit.vectors[3]}};
    }
  }
  template <int j>
  static Integers step(const Unit& unit) {
    return j % 2 == 0 ? unit.vectors[j / 2].even_bytes() : unit.vectors[j / 2].odd_bytes();
  }

  Bytes bytes;
};

// Rows of a grid: pairs as of codes of 8 bits.
template <Code kCode>
struct GridWords {
  static constexpr uint32_t kUnitBytes = GridDecoder<kCode>::kUnitBytes;
  static constexpr uint32_t kUnitK = GridDecoder<kCode>::kUnitK;
  static constexpr uint32_t kPair[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  explicit GridWords(const PanelLayout& layout) : signs(layout) {}

  using Unit = GridUnit<kCode>;
  Unit load(const std::byte* at, size_t k) const { return signs.unit(at, k); }
  template <int j>
  static Integers step(const Unit& unit) {
    const Integers four = unit.template quad<j / 2>();
    return j % 2 == 0 ? four.even_bytes() : four.odd_bytes();
  }
  GridSigns<kCode> signs;
};

// What every product of a code is more than it would be with the code's value.
int32_t middle_of_words(const WeightFormat& format) {
  return format.code == Code::kInt4 && !format.mins && !format.zeros ? 8 : 0;
}

// Of the decoders' integers.
float unit_of_words(const WeightFormat& format) {
  if (format.code == Code::kFloat4) return 0.5f;
  if (is_grid(format.code)) return grid_rows(format.code).unit;
  return format.code >= Code::kIq4 ? codebook_of(format.code).unit : 1.0f;
}

// What is added to code times scale.
enum class Offset { kNone, kZeros, kMins };

// Takes the codes' middle off a group's sum, or its zero points.
template <Offset kOffset>
[[gnu::always_inline]] inline Integers first_sum(const WordRow& row, uint32_t group, const float* zeros) {
  if constexpr (kOffset == Offset::kMins) return Integers::zero();
  const Integers offset = Integers::broadcast(static_cast<uint32_t>(row.offsets[group]));
  if constexpr (kOffset == Offset::kNone) return offset;
  return Integers::multiply(offset, Integers::from_float(Vec::load(zeros)));
}

[[gnu::always_inline]] inline Vec add_sum(Integers sum, const WordRow& row, uint32_t group, Vec scale, Vec total) {
  return Vec::fma(Vec::mul(sum.to_float(), Vec::broadcast(row.scales[group])), scale, total);
}

[[gnu::always_inline]] inline Vec finish_total(const PanelLayout& layout, const std::byte* panel, uint32_t column,
                                               Vec total) {
  const auto* const column_scale = reinterpret_cast<const float*>(panel + layout.column_scale_offset);
  const auto* const bias = reinterpret_cast<const float*>(panel + layout.bias_offset);
  if (layout.format.column_scale) total = Vec::mul(total, Vec::load(column_scale + column));
  return layout.has_bias ? Vec::add(total, Vec::load(bias + column)) : total;
}

// --- Up to kFewWordRows, in blocks of four: codes are widened in registers (multiply_block()).

template <class Words, Offset kOffset, int kRowCount, int kStripCount>
struct WordBlock {
  using Decoder = Words;
  static constexpr int kRows = kRowCount;
  static constexpr int kStrips = kStripCount;

  const Words decoder;
  const PanelLayout& layout;
  const std::byte* at[kStrips];
  WordRow rows[kRows];
  Vec total[kStrips][kRows];
  Integers sums[kStrips][kRows];

  [[gnu::always_inline]] WordBlock(const GemmWork& work, uint32_t first_strip, uint32_t row)
      : decoder(*work.layout), layout(*work.layout) {
    for (int s = 0; s < kStrips; ++s) {
      const Strip strip = strip_of(work, first_strip + s);
      at[s] = strip.panel + strip.column * sizeof(uint32_t);
      for (int r = 0; r < kRows; ++r) total[s][r] = Vec::zero();
    }
    for (int r = 0; r < kRows; ++r) rows[r] = word_row_at(layout, work.rows[row + r]);
  }

  [[gnu::always_inline]] void begin_group(uint32_t group, const GroupBuffer* zeros, uint32_t slot) {
    for (int s = 0; s < kStrips; ++s) {
      for (int r = 0; r < kRows; ++r) sums[s][r] = first_sum<kOffset>(rows[r], group, zeros[s].lanes[slot]);
    }
  }

  template <int... kSteps>
  [[gnu::always_inline]] void multiply_unit(size_t offset, size_t k, size_t ahead,
                                            std::integer_sequence<int, kSteps...>) {
    typename Words::Unit units[kStrips];
#pragma GCC unroll 4
    for (int s = 0; s < kStrips; ++s) {
      const std::byte* const source = at[s] + offset;
      for (uint32_t line = 0; line < Words::kUnitBytes && s % kStripsPerPanel == 0; line += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(source + ahead + line), _MM_HINT_T0);
      }
      units[s] = decoder.load(source, k);
    }
    (multiply_step<kSteps>(units, k / 2), ...);
  }

  template <int kStep>
  [[gnu::always_inline]] void multiply_step(const typename Words::Unit (&units)[kStrips], size_t pair) {
    if constexpr (kStep < static_cast<int>(Words::kUnitK / 2)) {
      Integers codes[kStrips];
#pragma GCC unroll 4
      for (int s = 0; s < kStrips; ++s) codes[s] = decoder.template step<kStep>(units[s]);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Integers element = Integers::broadcast(rows[r].pairs[pair + Words::kPair[kStep]]);
#pragma GCC unroll 4
        for (int s = 0; s < kStrips; ++s) {
          sums[s][r] = Integers::multiply_add(codes[s], element, sums[s][r]);
          if constexpr (kRows > 2) sums[s][r].keep();
        }
      }
    }
  }

  [[gnu::always_inline]] void end_group(uint32_t group, const GroupBuffer* scales, uint32_t slot) {
    for (int s = 0; s < kStrips; ++s) {
      const Vec scale = Vec::load(scales[s].lanes[slot]);
      for (int r = 0; r < kRows; ++r) total[s][r] = add_sum(sums[s][r], rows[r], group, scale, total[s][r]);
    }
  }

  [[gnu::always_inline]] void add_mins(uint32_t group, const GroupBuffer* mins, uint32_t slot) {
    for (int s = 0; s < kStrips; ++s) {
      const Vec minimum = Vec::load(mins[s].lanes[slot]);
      for (int r = 0; r < kRows; ++r) {
        total[s][r] = Vec::fma(minimum, Vec::broadcast(rows[r].sums[group]), total[s][r]);
      }
    }
  }

  [[gnu::always_inline]] void store(const GemmWork& work, uint32_t first_strip, uint32_t row) const {
    for (int s = 0; s < kStrips; ++s) {
      const Strip strip = strip_of(work, first_strip + s);
      float* const target = work.result + row * work.result_stride + size_t{first_strip + s} * Vec::kLanes;
      for (int r = 0; r < kRows; ++r) {
        finish_total(layout, strip.panel, strip.column, total[s][r]).store(target + r * work.result_stride);
      }
    }
  }
};

// --- Many rows: the codes of a few groups are widened once, into memory that stays in the first-level cache.

constexpr int kMostWordRows = 6;  // two strips each: 12 of 16 registers
constexpr uint32_t kFewWordRows = 8;
// Of rows of a grid, which take longer to look up than to read again: one block.
constexpr uint32_t kFewGridRows = 4;
template <class Words>
constexpr uint32_t kFewRowsOf = kFewWordRows;
template <Code kCode>
constexpr uint32_t kFewRowsOf<GridWords<kCode>> = kFewGridRows;
// A line has a pair of k for the 16 columns of a panel.
constexpr size_t kWidenedLines = size_t{kGroupsAtOnce} * 128 / 2;

// Some groups of a panel.
struct WidenedGroups {
  const std::byte* lines;
  const GroupBuffer* scales;   // [kStripsPerPanel]
  const GroupBuffer* offsets;  // [kStripsPerPanel] zero points or mins
  uint32_t group;
  uint32_t count;
  uint32_t group_lines;        // of all but the matrix's last group
  uint32_t lines_end;
};

// Two steps at a time, which may share what they are made of: it would be made again after a store.
template <class Words, int kTwo>
[[gnu::always_inline]] inline void store_steps(const Words& decoder, const typename Words::Unit& unit,
                                               std::byte* line) {
  const Integers first = decoder.template step<2 * kTwo>(unit);
  const Integers second = decoder.template step<2 * kTwo + 1>(unit);
  first.store(line + Words::kPair[2 * kTwo] * 64);
  second.store(line + Words::kPair[2 * kTwo + 1] * 64);
}

template <class Words, int... kTwos>
[[gnu::noinline]] void widen_codes(const PanelLayout& layout, const std::byte* panel, uint32_t k, uint32_t end,
                                   std::byte* target, std::integer_sequence<int, kTwos...>) {
  const Words decoder(layout);
  for (; k < end; k += Words::kUnitK, target += size_t{Words::kUnitK} * 32) {
    for (uint32_t s = 0; s < kStripsPerPanel; ++s) {
      const std::byte* const at = panel + size_t{k / Words::kUnitK} * Words::kUnitBytes + s * Vec::kLanes * 4;
      _mm_prefetch(reinterpret_cast<const char*>(at + kPrefetchBytes), _MM_HINT_T0);
      const typename Words::Unit unit = decoder.load(at, k);
      std::byte* const line = target + s * Vec::kLanes * 4;
      (store_steps<Words, kTwos>(decoder, unit, line), ...);
    }
  }
}

template <Offset kOffset, int kRows>
void multiply_widened(const GemmWork& work, uint32_t panel, uint32_t row, const WidenedGroups& groups) {
  const PanelLayout& layout = *work.layout;
  float* const result = work.result + row * work.result_stride + size_t{panel} * kPanelColumns;
  WordRow rows[kRows];
  for (int r = 0; r < kRows; ++r) rows[r] = word_row_at(layout, work.rows[row + r]);
  uint32_t line = 0;
  for (uint32_t slot = 0; slot < groups.count; ++slot) {
    const uint32_t group = groups.group + slot;
    const uint32_t end = line + groups.group_lines < groups.lines_end ? line + groups.group_lines : groups.lines_end;
    const size_t first_pair = size_t{group} * groups.group_lines - line;
    Integers sums[kStripsPerPanel][kRows];
    for (uint32_t s = 0; s < kStripsPerPanel; ++s) {
      for (int r = 0; r < kRows; ++r) {
        sums[s][r] = first_sum<kOffset>(rows[r], group, groups.offsets[s].lanes[slot]);
      }
    }
    for (; line < end; ++line) {
      Integers codes[kStripsPerPanel];
      for (uint32_t s = 0; s < kStripsPerPanel; ++s) {
        codes[s] = Integers::load(groups.lines + size_t{line} * 64 + s * Vec::kLanes * 4);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Integers element = Integers::broadcast(rows[r].pairs[first_pair + line]);
#pragma GCC unroll 4
        for (uint32_t s = 0; s < kStripsPerPanel; ++s) {
          sums[s][r] = Integers::multiply_add(codes[s], element, sums[s][r]);
          sums[s][r].keep();
        }
      }
    }
    for (uint32_t s = 0; s < kStripsPerPanel; ++s) {
      const Vec scale = Vec::load(groups.scales[s].lanes[slot]);
      for (int r = 0; r < kRows; ++r) {
        float* const target = result + r * work.result_stride + s * Vec::kLanes;
        Vec total = add_sum(sums[s][r], rows[r], group, scale, Vec::load(target));
        if constexpr (kOffset == Offset::kMins) {
          total = Vec::fma(Vec::load(groups.offsets[s].lanes[slot]), Vec::broadcast(rows[r].sums[group]), total);
        }
        total.store(target);
      }
    }
  }
}

// Equal blocks of up to `most` rows: calls block(row, rows).
template <class Run>
[[gnu::always_inline]] inline void in_blocks(uint32_t num_rows, uint32_t most, Run&& run) {
  uint32_t row = 0;
  for (uint32_t left = (num_rows + most - 1) / most; left > 0; --left) {
    const uint32_t rows = (num_rows - row + left - 1) / left;
    run(row, rows);
    row += rows;
  }
}

template <Offset kOffset, int... kRowsMinusOne>
void multiply_widened_rows(const GemmWork& work, uint32_t panel, const WidenedGroups& groups,
                           std::integer_sequence<int, kRowsMinusOne...>) {
  using Multiply = void (*)(const GemmWork&, uint32_t, uint32_t, const WidenedGroups&);
  static constexpr Multiply kTable[] = {multiply_widened<kOffset, kRowsMinusOne + 1>...};
  in_blocks(work.num_rows, kMostWordRows,
            [&](uint32_t row, uint32_t rows) { kTable[rows - 1](work, panel, row, groups); });
}

template <class Words, Offset kOffset>
void run_many_word_rows(const GemmWork& work) {
  constexpr auto kTwos = std::make_integer_sequence<int, Words::kUnitK / 4>();
  const PanelLayout& layout = *work.layout;
  const uint32_t size = layout.format.group_size;
  std::byte* const lines = work.scratch;
  GroupBuffer scales[kStripsPerPanel];
  GroupBuffer offsets[kStripsPerPanel];
  for (uint32_t panel = 0; panel < work.num_panels; ++panel) {
    const std::byte* const codes = work.panels + size_t{panel} * layout.panel_bytes;
    float* const results = work.result + size_t{panel} * kPanelColumns;
    for (uint32_t row = 0; row < work.num_rows; ++row) {
      for (uint32_t s = 0; s < kStripsPerPanel; ++s) {
        Vec::zero().store(results + row * work.result_stride + s * Vec::kLanes);
      }
    }
    for (uint32_t group = 0; group < layout.groups; group += kGroupsAtOnce) {
      const uint32_t left = layout.groups - group;
      const uint32_t count = left < kGroupsAtOnce ? left : kGroupsAtOnce;
      const uint32_t k = group * size;
      const uint32_t end = k + count * size < layout.k_padded ? k + count * size : layout.k_padded;
      widen_groups(work, panel * kStripsPerPanel, kStripsPerPanel, group, count, scales, offsets);
      widen_codes<Words>(layout, codes, k, end, lines, kTwos);
      multiply_widened_rows<kOffset>(work, panel, {lines, scales, offsets, group, count, size / 2, (end - k) / 2},
                            std::make_integer_sequence<int, kMostWordRows>());
    }
    for (uint32_t row = 0; row < work.num_rows; ++row) {
      float* const result = results + row * work.result_stride;
      for (uint32_t column = 0; column < kPanelColumns; column += Vec::kLanes) {
        finish_total(layout, codes, column, Vec::load(result + column)).store(result + column);
      }
    }
  }
}

template <class Words, Offset kOffset>
void run_words_of(const GemmWork& work) {
  if (work.num_rows > kFewRowsOf<Words>) return run_many_word_rows<Words, kOffset>(work);
  using Multiply = void (*)(const GemmWork&, uint32_t, uint32_t);
  static constexpr Multiply kTable[] = {multiply_block<WordBlock<Words, kOffset, 1, kStripsPerPanel>>,
                                        multiply_block<WordBlock<Words, kOffset, 2, kStripsPerPanel>>,
                                        multiply_block<WordBlock<Words, kOffset, 3, kStripsPerPanel>>,
                                        multiply_block<WordBlock<Words, kOffset, 4, kStripsPerPanel>>};
  for (uint32_t strip = 0; strip < work.num_panels * kStripsPerPanel; strip += kStripsPerPanel) {
    in_blocks(work.num_rows, sizeof(kTable) / sizeof(kTable[0]),
              [&](uint32_t row, uint32_t rows) { kTable[rows - 1](work, strip, row); });
  }
}

// For formats of whole numbers, which may have mins.
template <class Words>
void run_whole_words(const GemmWork& work) {
  work.layout->format.mins ? run_words_of<Words, Offset::kMins>(work) : run_words_of<Words, Offset::kNone>(work);
}

void run_words(const GemmWork& work) {
  const WeightFormat& format = work.layout->format;
  switch (format.code) {
    case Code::kInt8: return run_whole_words<Int8Words>(work);
    case Code::kInt4:
      return format.zeros ? run_words_of<Int4Words, Offset::kZeros>(work) : run_whole_words<Int4Words>(work);
    case Code::kFloat4: return run_words_of<ByteWords<Float4Decoder, 2>, Offset::kNone>(work);
    case Code::kIq4: return run_words_of<ByteWords<Iq4Decoder, 2>, Offset::kNone>(work);
    case Code::kInt2: return run_whole_words<ByteWords<PlaneDecoder<2>, 4>>(work);
    case Code::kInt3: return run_words_of<ByteWords<PlaneDecoder<3>, 4>, Offset::kNone>(work);
    case Code::kInt5: return run_whole_words<ByteWords<PlaneDecoder<5>, 4>>(work);
    case Code::kInt6: return run_words_of<ByteWords<PlaneDecoder<6>, 4>, Offset::kNone>(work);
    case Code::kIq3Xxs: return run_words_of<GridWords<Code::kIq3Xxs>, Offset::kNone>(work);
    case Code::kIq3S: return run_words_of<GridWords<Code::kIq3S>, Offset::kNone>(work);
    case Code::kIq2Xxs: return run_words_of<GridWords<Code::kIq2Xxs>, Offset::kNone>(work);
    case Code::kIq2Xs: return run_words_of<GridWords<Code::kIq2Xs>, Offset::kNone>(work);
    case Code::kIq2S: return run_words_of<GridWords<Code::kIq2S>, Offset::kNone>(work);
    case Code::kIq1S: return run_words_of<GridWords<Code::kIq1S>, Offset::kNone>(work);
    case Code::kIq1M: return run_words_of<GridWords<Code::kIq1M>, Offset::kNone>(work);
    case Code::kTq1: return run_words_of<GridWords<Code::kTq1>, Offset::kNone>(work);
    case Code::kFloat32:
    case Code::kBFloat16:
    case Code::kFloat16:
    case Code::kFloat8: break;
  }
}

bool supports_words(const WeightFormat& format) {
  return format.code >= Code::kInt8 && format.group_size != 0 && !format.quantised_rows && !format.panel_scale;
}

size_t scratch_words(const PanelLayout&, uint32_t, uint32_t num_rows) {
  return num_rows > kFewGridRows ? kWidenedLines * 64 : 0;
}

struct WordScale {
  float scale;    // of the integers
  float inverse;  // of the values
};

// From a group's largest absolute value.
WordScale word_scale(float largest) {
  const auto from_bits = [](uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  };
  uint32_t bits;
  __builtin_memcpy(&bits, &largest, sizeof bits);
  uint32_t exponent = bits >> 23;
  if (exponent == 255) return {from_bits(0x7fc00000u), 0.0f};
  if (exponent < 15) exponent = 15;
  return {from_bits((exponent - 14) << 23), from_bits((268 - exponent) << 23)};
}

void prepare_words(const PanelLayout& layout, const void* row, std::byte* prepared) {
  const auto* const elements = static_cast<const uint16_t*>(row);
  auto* const words = reinterpret_cast<int16_t*>(prepared);
  auto* const scales = reinterpret_cast<float*>(prepared + size_t{layout.k_padded} * 2);
  auto* const sums = scales + layout.groups;
  auto* const offsets = reinterpret_cast<int32_t*>(sums);
  const float unit = unit_of_words(layout.format);
  const int32_t middle = layout.format.zeros ? 1 : middle_of_words(layout.format);
  const bool swaps = layout.format.code == Code::kInt8 || is_grid(layout.format.code);
  for (uint32_t group = 0; group < layout.groups; ++group) {
    const uint32_t begin = group * layout.format.group_size;
    const uint32_t after = begin + layout.format.group_size;
    const uint32_t end = after < layout.k_padded ? after : layout.k_padded;
    Integers bits = Integers::zero();
    for (uint32_t k = begin; k < end; k += Vec::kLanes) {
      bits = Integers::max(bits, Integers::absolute_bits(Vec::from_bfloat16(elements + k)));
    }
    const WordScale scale = word_scale(bits.largest_bits());
    const Vec inverse = Vec::broadcast(scale.inverse);
    Integers total = Integers::zero();
    for (uint32_t k = begin; k < end; k += Vec::kLanes) {
      const Integers integers = Integers::from_float(Vec::mul(Vec::from_bfloat16(elements + k), inverse));
      total = Integers::add(total, integers);
      integers.store_words(words + k, swaps);
    }
    const int32_t sum = total.sum();
    scales[group] = scale.scale * unit;
    if (layout.format.mins) {
      sums[group] = static_cast<float>(sum) * scale.scale;
    } else {
      offsets[group] = -middle * sum;
    }
  }
}
