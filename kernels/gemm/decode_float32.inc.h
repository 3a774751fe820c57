// Codes -> float32 with AVX2 or AVX-512. Included INSIDE an anonymous namespace, after the level's Vec and Integers.
//
// A decoder takes one unit (kUnitBytes of a panel, kUnitK of k) and gives value<j>() for j in 0..kUnitK-1, to be
// multiplied with row<j>(). Chain j % 2 adds them up; finish() makes one sum of the two chains. A unit stays in
// kUnitRegisters while it is used. AVX2 takes half a line (eight columns) at a time. Nibbles, which either level
// looks up in its own way, are in gemm_avx2.cc and gemm_avx512.cc.

struct PlainRow {
  static constexpr bool kRareCodes = false;
  template <int j>
  static Vec row(const float* row) {
    return Vec::broadcast(row[j]);
  }
  static Vec finish(Vec even, Vec odd) { return Vec::add(even, odd); }
};

struct Float32Decoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 128;
  static constexpr uint32_t kUnitK = 2;
  static constexpr int kUnitRegisters = 0;
  explicit Float32Decoder(const PanelLayout&) {}

  struct Unit {
    const float* at;
  };
  static Unit load(const std::byte* at, size_t, Vec) { return {reinterpret_cast<const float*>(at)}; }
  template <int j>
  Vec value(const Unit& unit) const {
    return Vec::load(unit.at + j * kPanelColumns);
  }
};

struct BFloat16Decoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 2;
  static constexpr int kUnitRegisters = 1;
  explicit BFloat16Decoder(const PanelLayout&) {}

  struct Unit {
    Integers words;
  };
  static Unit load(const std::byte* at, size_t, Vec) { return {Integers::load(at)}; }
  template <int j>
  Vec value(const Unit& unit) const {
    return unit.words.template bfloat16_half<j>();
  }
};

// Lanes alternate between even and odd k, so that a conversion takes its columns straight from memory: value 0 holds
// the first half of them, value 1 the second, and chains mean these halves until finish().
struct Float16Decoder {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 2;
  static constexpr int kUnitRegisters = 0;
  static constexpr bool kRareCodes = false;
  explicit Float16Decoder(const PanelLayout&) {}

  struct Unit {
    const std::byte* at;
  };
  static Unit load(const std::byte* at, size_t, Vec) { return {at}; }
  template <int j>
  Vec value(const Unit& unit) const {
    return Vec::from_float16(unit.at + j * 2 * Vec::kLanes);
  }
  template <int j>
  static Vec row(const float* row) {
    return Vec::broadcast_pair(row);
  }
  static Vec finish(Vec low, Vec high) { return add_neighbours(low, high); }
};

// e4m3 seeeemmm becomes the bfloat16 s0111eeeemmm0000: 2^-8 times its value where it is normal. Subnormal codes,
// zero and NaN are rare in trained weights and repaired in a branch.
struct Float8Decoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 4;
  static constexpr int kUnitRegisters = 2;
  static constexpr bool kRareCodes = true;
  explicit Float8Decoder(const PanelLayout&) {}

  struct Unit {
    Integers even;
    Integers odd;
    Integers key;
  };
  static Unit load(const std::byte* at, size_t, Vec) {
    const Integers words = Integers::load(at);
    return {words.even_float8_as_bfloat16(), words.odd_float8_as_bfloat16(), words.float8_key()};
  }
  template <int kStrips>
  static bool any_rare(const Unit (&units)[kStrips]) {
    Integers largest = units[0].key;
    for (int s = 1; s < kStrips; ++s) largest = Integers::max_bytes(largest, units[s].key);
    return largest.any_byte_above_237();
  }
  static Vec repair(Vec value) { return fix_float8(value); }
  template <int j>
  Vec value(const Unit& unit) const {
    return (j % 2 == 0 ? unit.even : unit.odd).template bfloat16_half<j / 2>();
  }
  static Vec finish(Vec even, Vec odd) { return Vec::mul(Vec::add(even, odd), Vec::broadcast(256.0f)); }
};

struct Int8Decoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 64;
  static constexpr uint32_t kUnitK = 4;
  static constexpr int kUnitRegisters = 1;
  explicit Int8Decoder(const PanelLayout&) {}

  struct Unit {
    Integers words;
  };
  static Unit load(const std::byte* at, size_t, Vec) { return {Integers::load(at)}; }
  template <int j>
  Vec value(const Unit& unit) const {
    return unit.words.template signed_byte<j>();
  }
};

inline const Codebook& codebook_of(Code code) {
  return *kCodebooks[static_cast<int>(code) - static_cast<int>(Code::kIq4)];
}

// Codes of 2, 3, 5 and 6 bits in planes (panel_layout.h); 16 k at a time, of the 32 that share planes. They become
// signed bytes.
template <int kBits>
struct PlaneDecoder : PlainRow {
  static constexpr uint32_t kUnitBytes = 32 * kBits;
  static constexpr uint32_t kUnitK = 16;
  static constexpr int kUnitRegisters = 4;
  static constexpr int kLowBits = kBits < 4 ? 2 : 4;
  static constexpr int kHighBits = kBits - kLowBits;
  explicit PlaneDecoder(const PanelLayout& layout)
      : middle(Integers::bytes(nullptr, layout.format.mins ? 0 : 1 << (kBits - 1))) {}

  struct Unit {
    Integers vectors[4];
  };
  Unit load(const std::byte* at, size_t k, Vec) const {
    return k % 32 == 0 ? load_half<0>(at) : load_half<1>(at - kUnitBytes);
  }
  template <int kHalf>
  [[gnu::always_inline]] Unit load_half(const std::byte* planes) const {
    return {{vector<kHalf * 4>(planes), vector<kHalf * 4 + 1>(planes), vector<kHalf * 4 + 2>(planes),
             vector<kHalf * 4 + 3>(planes)}};
  }
  template <int kVector>
  [[gnu::always_inline]] Integers vector(const std::byte* planes) const {
    Integers codes = field<kVector, kLowBits, 0>(planes);
    if constexpr (kHighBits != 0) {
      codes = Integers::either(codes, field<kVector, kHighBits, kLowBits>(planes + kLowBits * 64));
    }
    return codes.minus_bytes(middle);
  }
  template <int kVector, int kWidth, int kPlace>
  [[gnu::always_inline]] static Integers field(const std::byte* lines) {
    constexpr int kInLine = 8 / kWidth;
    const Integers line = Integers::load(lines + kVector / kInLine * 64);
    return line.template bytes_shifted<kVector % kInLine * kWidth - kPlace>(((1 << kWidth) - 1) << kPlace);
  }
  template <int j>
  Vec value(const Unit& unit) const {
    constexpr int kInRun = j % 8;
    return unit.vectors[j / 8 * 2 + kInRun / 2 % 2].template signed_byte<kInRun / 4 + kInRun % 2 * 2>();
  }

  Integers middle;  // what is subtracted from every byte
};
