#include "kernels/format/gguf_blocks.h"

#include <tmmintrin.h>

#include <stdexcept>

#include "kernels/format/numbers.h"

namespace moebius {
namespace {

using Bytes = const uint8_t*;

uint16_t half_at(Bytes at) { return load_element<uint16_t>(at, 0); }

// A word as decode_product_word reads it.
void store_product(uint8_t* target, uint32_t index, uint16_t factor, int whole) {
  const uint32_t word = factor | uint32_t{static_cast<uint8_t>(whole)} << 16;
  std::memcpy(target + index * 4, &word, 4);
}

uint16_t negative(uint16_t half) { return half ^ 0x8000U; }

// Nibbles of 16 bytes, two to a byte, the one of the even byte low: low nibbles first, then high ones.
struct Nibbles {
  __m128i low, high;  // words of 16 bits that hold 8 bits each

  explicit Nibbles(Bytes at) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)), mask = _mm_set1_epi8(15);
    low = joined(_mm_and_si128(bytes, mask));
    high = joined(_mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
  }
  static __m128i joined(__m128i codes) { return _mm_maddubs_epi16(codes, _mm_set1_epi16(0x1001)); }
};

void store(uint8_t* target, __m128i bytes) { _mm_storeu_si128(reinterpret_cast<__m128i*>(target), bytes); }

// 16 last bytes: columns 0 to 15 in the low nibbles, 16 to 31 in the high ones.
template <uint32_t kPlace>
void half_words(Bytes block, uint8_t* target) {
  const Nibbles nibbles(block + kPlace);
  store(target, _mm_packus_epi16(nibbles.low, nibbles.high));
}

// 4 x 32 bytes, each of a group's code and the next one's.
void q4_k_words(Bytes block, uint8_t* target) {
  for (uint32_t pair = 0; pair < 4; ++pair) {
    const Nibbles first(block + 16 + pair * 32), second(block + 32 + pair * 32);
    store(target + pair * 32, _mm_packus_epi16(first.low, second.low));
    store(target + pair * 32 + 16, _mm_packus_epi16(first.high, second.high));
  }
}

// kCount bytes from kPlace on, as they are.
template <uint32_t kPlace, uint32_t kCount>
void copy(Bytes block, uint8_t* target) {
  std::memcpy(target, block + kPlace, kCount);
}

// 32 fifth bits from kPlace on, then 16 bytes of nibbles: codes 0 to 31.
template <uint32_t kPlace>
void five_bits(Bytes block, uint8_t* target) {
  const auto fifth = load_element<uint32_t>(block + kPlace, 0);
  const Bytes nibbles = block + kPlace + 4;
  for (uint32_t i = 0; i < 16; ++i) {
    target[i] = static_cast<uint8_t>((nibbles[i] & 15U) | (fifth >> i & 1U) << 4);
    target[i + 16] = static_cast<uint8_t>(nibbles[i] >> 4 | (fifth >> (i + 16) & 1U) << 4);
  }
}

// As Q4_K, with the codes' fifth bits of all groups in 32 bytes before them.
void q5_k_codes(Bytes block, uint8_t* target) {
  const Bytes fifth = block + 16;
  for (uint32_t group = 0; group < 8; ++group) {
    const Bytes nibbles = block + 48 + group / 2 * 32;
    for (uint32_t i = 0; i < 32; ++i) {
      target[group * 32 + i] =
          static_cast<uint8_t>((nibbles[i] >> group % 2 * 4 & 15) | (fifth[i] >> group & 1) << 4);
    }
  }
}

// Two halves of 64 low bytes and 32 high ones: in a half, low nibbles of the two 32 bytes are quarters 0 and 1, high
// ones 2 and 3, and bits 2q and 2q + 1 of the high bytes are quarter q's.
void q6_k_codes(Bytes block, uint8_t* target) {
  for (uint32_t quarter = 0; quarter < 8; ++quarter) {
    const uint32_t half = quarter / 4, q = quarter % 4;
    const Bytes low = block + half * 64 + q % 2 * 32, high = block + 128 + half * 32;
    for (uint32_t i = 0; i < 32; ++i) {
      target[quarter * 32 + i] = static_cast<uint8_t>((low[i] >> q / 2 * 4 & 15) | (high[i] >> q * 2 & 3) << 4);
    }
  }
}

// kGroups groups of 16 bytes from kPlace on: 16 columns in the low nibbles, 16 more in the high ones.
template <uint32_t kPlace, uint32_t kGroups>
void iq4_codes(Bytes block, uint8_t* target) {
  const __m128i mask = _mm_set1_epi8(15);
  for (uint32_t group = 0; group < kGroups; ++group) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block + kPlace + group * 16));
    store(target + group * 32, _mm_and_si128(bytes, mask));
    store(target + group * 32 + 16, _mm_and_si128(_mm_srli_epi16(bytes, 4), mask));
  }
}

// 64 bytes are two halves of 32; bits 2q and 2q + 1 of a half are quarter q's of 32 columns.
uint8_t two_bits(Bytes packed, uint32_t quarter, uint32_t i) {
  return packed[quarter / 4 * 32 + i] >> quarter % 4 * 2 & 3;
}

template <uint32_t kPlace>
void two_bit_codes(Bytes block, uint8_t* target) {
  for (uint32_t quarter = 0; quarter < 8; ++quarter) {
    for (uint32_t i = 0; i < 32; ++i) target[quarter * 32 + i] = two_bits(block + kPlace, quarter, i);
  }
}

// Codes mean -1 to 2, those of a packed format -2 to 1: the negatives, with negative scales.
void tq2_0_codes(Bytes block, uint8_t* target) {
  two_bit_codes<0>(block, target);
  for (uint32_t i = 0; i < 256; ++i) target[i] = static_cast<uint8_t>(3 - target[i]);
}

// Digits to the base of 3, which mean -1, 0 and 1: a byte holds kDigits of them, kRun weights apart.
template <uint32_t kDigits, uint32_t kRun>
int8_t* thirds(Bytes packed, int8_t* target) {
  uint8_t power = 1;
  for (uint32_t digit = 0; digit < kDigits; ++digit, power = static_cast<uint8_t>(power * 3)) {
    for (uint32_t i = 0; i < kRun; ++i) {
      *target++ = static_cast<int8_t>((static_cast<uint8_t>(packed[i] * power) * 3 >> 8) - 1);
    }
  }
  return target;
}

// Five digits, kStep apart, as a byte of trit() in panel_values.h.
template <uint32_t kStep>
uint32_t five_digits(const int8_t* digits) {
  int number = 0;
  for (uint32_t i = 0; i < 5; ++i) number = number * 3 + digits[i * kStep];
  // A multiple of 256 more, so that rounding down rounds to the nearest.
  return static_cast<uint32_t>(((number + 243) * 512 + 243) / 486) & 255;
}

void tq1_0_words(Bytes block, uint8_t* target) {
  int8_t digits[256];
  thirds<4, 4>(block + 48, thirds<5, 16>(block + 32, thirds<5, 32>(block, digits)));
  for (const int8_t* of_group = digits; of_group < digits + 256; of_group += 32, target += 8) {
    uint32_t words[2] = {};
    for (uint32_t i = 0; i < 4; ++i) words[0] |= five_digits<4>(of_group + i) << (i * 8);
    for (uint32_t i = 0; i < 2; ++i) {
      words[1] |= five_digits<2>(of_group + 20 + i) << (i * 8);
      words[1] |= (static_cast<uint32_t>(of_group[30 + i]) & 3) << (16 + i * 2);
    }
    std::memcpy(target, words, sizeof words);
  }
}

void tq1_0_scales(Bytes block, uint8_t* target) {
  for (uint32_t i = 0; i < 8; ++i) store_product(target, i, half_at(block + 52), 1);
}

// A scale for 256 weights as two for 128, negative.
template <uint32_t kPlace>
void negative_halves(Bytes block, uint8_t* target) {
  const uint16_t scale = negative(half_at(block + kPlace));
  for (uint32_t i = 0; i < 2; ++i) std::memcpy(target + i * 2, &scale, 2);
}

// 0 to 7, meaning 4 less: two low bits, and a third in 32 bytes before them; bit q of these is quarter q's.
void q3_k_codes(Bytes block, uint8_t* target) {
  for (uint32_t quarter = 0; quarter < 8; ++quarter) {
    for (uint32_t i = 0; i < 32; ++i) {
      target[quarter * 32 + i] =
          static_cast<uint8_t>(two_bits(block + 32, quarter, i) | (block[i] >> quarter & 1) << 2);
    }
  }
}

// 64 weights as e2m1, four times 16 in eight bytes, low nibbles first: codes one a byte.
void nvfp4_codes(Bytes block, uint8_t* target) {
  for (uint32_t group = 0; group < 4; ++group) {
    for (uint32_t i = 0; i < 8; ++i) {
      const uint8_t both = block[4 + group * 8 + i];
      target[group * 16 + i] = both & 15;
      target[group * 16 + 8 + i] = both >> 4;
    }
  }
}

// --- Scales and mins that are products of float16 factors and whole numbers.

// Of Q4_K and Q5_K: two factors, then in 12 bytes 8 scales and 8 mins 6 bits wide, the first four of each whole, of the
// others two bits next to them.
uint32_t k_scale(Bytes packed, uint32_t group) {
  return group < 4 ? packed[group] & 63U : (packed[group + 4] & 15U) | (packed[group - 4] >> 2 & 0x30U);
}
uint32_t k_min(Bytes packed, uint32_t group) {
  return group < 4 ? packed[group + 4] & 63U : packed[group + 4] >> 4 | (packed[group] >> 2 & 0x30U);
}

void k_scales(Bytes block, uint8_t* target) {
  for (uint32_t i = 0; i < 8; ++i) store_product(target, i, half_at(block), static_cast<int>(k_scale(block + 4, i)));
}

void k_mins(Bytes block, uint8_t* target) {
  const uint16_t factor = negative(half_at(block + 2));
  for (uint32_t i = 0; i < 8; ++i) store_product(target, i, factor, static_cast<int>(k_min(block + 4, i)));
}

void q6_k_scales(Bytes block, uint8_t* target) {
  const uint16_t factor = half_at(block + 208);
  for (uint32_t i = 0; i < 16; ++i) store_product(target, i, factor, block[192 + i]);
}

void q2_k_scales(Bytes block, uint8_t* target) {
  for (uint32_t i = 0; i < 16; ++i) store_product(target, i, half_at(block + 80), block[i] & 15);
}

void q2_k_mins(Bytes block, uint8_t* target) {
  const uint16_t factor = negative(half_at(block + 82));
  for (uint32_t i = 0; i < 16; ++i) store_product(target, i, factor, block[i] >> 4);
}

// 16 numbers of 6 bits less 32: of 12 bytes, eight have the low bits in their nibbles, and bits 2i and 2i + 1 of the
// last four the high ones of numbers 4i to 4i + 3.
void q3_k_scales(Bytes block, uint8_t* target) {
  const Bytes packed = block + 96;
  for (uint32_t i = 0; i < 16; ++i) {
    const int low = packed[i % 8] >> i / 8 * 4 & 15, high = packed[8 + i % 4] >> i / 4 * 2 & 3;
    store_product(target, i, half_at(block + 108), (low | high << 4) - 32);
  }
}

// A factor times eight numbers of 6 bits less 32: low bits in nibbles, two high ones before them.
void iq4_xs_scales(Bytes block, uint8_t* target) {
  const auto high = load_element<uint16_t>(block + 2, 0);
  for (uint32_t i = 0; i < 8; ++i) {
    const int low = block[4 + i / 2] >> i % 2 * 4 & 15;
    store_product(target, i, half_at(block), (low | (high >> i * 2 & 3) << 4) - 32);
  }
}

// --- Types whose weights are rows of grids: words as SourceLayout::kGridWords has them, and factors times 2 s + 1.

// 64 numbers of rows, then eight words of signs and s.
void iq3_xxs_words(Bytes block, uint8_t* target) {
  for (uint32_t group = 0; group < 8; ++group, target += 16) {
    std::memcpy(target, block + 2 + group * 8, 8);
    std::memcpy(target + 8, block + 66 + group * 4, 4);
    std::memset(target + 12, 0, 4);
  }
}

// The words of groups lie kStep bytes apart.
template <uint32_t kPlace, uint32_t kStep>
void grid_scales(Bytes block, uint8_t* target) {
  for (uint32_t i = 0; i < 8; ++i) {
    const auto word = load_element<uint32_t>(block + kPlace + i * kStep, 0);
    store_product(target, i, half_at(block), static_cast<int>((word >> 28) * 2 + 1));
  }
}

// Two numbers s to a byte.
template <uint32_t kPlace, uint32_t kCount>
void nibble_scales(Bytes block, uint8_t* target) {
  for (uint32_t i = 0; i < kCount; ++i) {
    store_product(target, i, half_at(block), (block[kPlace + i / 2] >> i % 2 * 4 & 15) * 2 + 1);
  }
}

// 32 low bytes of numbers, as many of signs, and two high bits of each number: these to the numbers, for which two
// signs move to a byte of their own.
void iq2_s_words(Bytes block, uint8_t* target) {
  for (uint32_t group = 0; group < 8; ++group, target += 16) {
    uint32_t words[4] = {};
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t signs = block[34 + group * 4 + i], high = block[66 + group] >> (i * 2) & 3;
      const uint32_t number = block[2 + group * 4 + i] | high << 8;
      words[i / 2] |= (number | (signs & 63) << 10) << (i % 2 * 16);
      words[2] |= signs >> 6 << (i * 2);
    }
    std::memcpy(target, words, sizeof words);
  }
}

// 64 low bytes of numbers, a ninth bit of each, then four bytes of signs: a half of the numbers have a word's upper and
// lower nine bits and nine in between, the fourth those of a word that both halves share, and signs what is left.
void iq3_s_words(Bytes block, uint8_t* target) {
  for (uint32_t group = 0; group < 8; ++group, target += 16) {
    uint32_t words[4] = {};
    for (uint32_t half = 0; half < 2; ++half) {
      uint32_t numbers[4];
      for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t place = half * 4 + i;
        numbers[i] = block[2 + group * 8 + place] | (block[66 + group] >> place & 1U) << 8;
      }
      const uint32_t signs = load_element<uint16_t>(block + 74 + group * 4, half);
      words[half * 2] = numbers[0] | numbers[1] << 10 | numbers[2] << 23 | (signs >> 11 & 15) << 19 | signs >> 15 << 9;
      words[1] |= numbers[3] << (half * 23) | (signs >> 4 & 127) << (9 + half * 7);
      words[3] |= (signs & 15) << (half * 4);
    }
    std::memcpy(target, words, sizeof words);
  }
}

// Four numbers of 11 bits, and four bits `more`, of which each half of 32 weights gets two: words of panel_values.h.
void iq1_group(const uint32_t (&numbers)[4], uint32_t more, uint8_t* target) {
  uint32_t words[2] = {};
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t first = numbers[half * 2], second = numbers[half * 2 + 1];
    words[0] |= (first | (second & 31) << 11) << (half * 16);
    words[1] |= (second >> 5 | (more >> (half * 2) & 3) << 6) << (half * 8);
  }
  std::memcpy(target, words, sizeof words);
}

// 32 low bytes of numbers; for each four a word of three high bits of each, then s and whether values are an eighth less.
void iq1_s_words(Bytes block, uint8_t* target) {
  for (uint32_t group = 0; group < 8; ++group, target += 8) {
    const uint32_t high = load_element<uint16_t>(block + 34, group);
    uint32_t numbers[4];
    for (uint32_t i = 0; i < 4; ++i) numbers[i] = block[2 + group * 4 + i] | (high >> (i * 3) & 7) << 8;
    iq1_group(numbers, high >> 12, target);
  }
}

void iq1_s_scales(Bytes block, uint8_t* target) {
  for (uint32_t i = 0; i < 8; ++i) {
    const int s = load_element<uint16_t>(block + 34, i) >> 12 & 7;
    store_product(target, i, half_at(block), s * 2 + 1);
  }
}

// 32 low bytes of numbers; nibbles of each one's three high bits and whether values are an eighth less.
void iq1_m_words(Bytes block, uint8_t* target) {
  for (uint32_t group = 0; group < 8; ++group, target += 8) {
    uint32_t numbers[4], less = 0;
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t high = block[32 + group * 2 + i / 2] >> (i % 2 * 4) & 15U;
      numbers[i] = block[group * 4 + i] | (high & 7) << 8;
      less |= high >> 3 << i;
    }
    iq1_group(numbers, less, target);
  }
}

// Four words of four s of 3 bits each, and in their upper bits a quarter of the factor's.
void iq1_m_scales(Bytes block, uint8_t* target) {
  uint32_t factor = 0;
  for (uint32_t i = 0; i < 4; ++i) factor |= load_element<uint16_t>(block + 48, i) >> 12 << (i * 4);
  for (uint32_t i = 0; i < 16; ++i) {
    const int s = load_element<uint16_t>(block + 48, i / 4) >> (i % 4 * 3) & 7;
    store_product(target, i, static_cast<uint16_t>(factor), s * 2 + 1);
  }
}

template <uint32_t kBlockBytes, uint32_t kPartBytes, void (*kTake)(Bytes block, uint8_t* target)>
void take_rows(const GgufRows& source, std::byte* target) {
  auto* to = reinterpret_cast<uint8_t*>(target);
  for (uint32_t row = 0; row < source.rows; ++row) {
    const auto* block = reinterpret_cast<Bytes>(source.first + static_cast<ptrdiff_t>(row) * source.row_stride);
    for (uint32_t i = 0; i < source.blocks; ++i, block += kBlockBytes, to += kPartBytes) kTake(block, to);
  }
}

template <uint32_t kBlockBytes, uint32_t kPartBytes, void (*kTake)(Bytes block, uint8_t* target)>
constexpr GgufPart part(const char* type, const char* name) {
  return {type, name, kBlockBytes, kPartBytes, take_rows<kBlockBytes, kPartBytes, kTake>};
}

}  // namespace

const std::vector<GgufPart>& gguf_parts() {
  static const std::vector<GgufPart> parts = {
      part<18, 16, half_words<2>>("Q4_0", "codes"),       part<18, 2, copy<0, 2>>("Q4_0", "scales"),
      part<20, 16, half_words<4>>("Q4_1", "codes"),       part<20, 2, copy<0, 2>>("Q4_1", "scales"),
      part<20, 2, copy<2, 2>>("Q4_1", "mins"),            part<144, 128, q4_k_words>("Q4_K", "codes"),
      part<144, 32, k_scales>("Q4_K", "scales"),          part<144, 32, k_mins>("Q4_K", "mins"),
      part<22, 32, five_bits<2>>("Q5_0", "codes"),    part<22, 2, copy<0, 2>>("Q5_0", "scales"),
      part<24, 32, five_bits<4>>("Q5_1", "codes"),     part<24, 2, copy<0, 2>>("Q5_1", "scales"),
      part<24, 2, copy<2, 2>>("Q5_1", "mins"),            part<176, 256, q5_k_codes>("Q5_K", "codes"),
      part<176, 32, k_scales>("Q5_K", "scales"),          part<176, 32, k_mins>("Q5_K", "mins"),
      part<210, 256, q6_k_codes>("Q6_K", "codes"),        part<210, 64, q6_k_scales>("Q6_K", "scales"),
      part<34, 32, copy<2, 32>>("Q8_0", "codes"),         part<34, 2, copy<0, 2>>("Q8_0", "scales"),
      part<84, 256, two_bit_codes<16>>("Q2_K", "codes"),         part<84, 64, q2_k_scales>("Q2_K", "scales"),
      part<84, 64, q2_k_mins>("Q2_K", "mins"),            part<110, 256, q3_k_codes>("Q3_K", "codes"),
      part<110, 64, q3_k_scales>("Q3_K", "scales"),       part<18, 32, iq4_codes<2, 1>>("IQ4_NL", "codes"),
      part<18, 2, copy<0, 2>>("IQ4_NL", "scales"),        part<136, 256, iq4_codes<8, 8>>("IQ4_XS", "codes"),
      part<136, 32, iq4_xs_scales>("IQ4_XS", "scales"),   part<17, 16, half_words<1>>("MXFP4", "codes"),
      part<17, 1, copy<0, 1>>("MXFP4", "scales"),         part<54, 64, tq1_0_words>("TQ1_0", "codes"),
      part<54, 32, tq1_0_scales>("TQ1_0", "scales"),     part<66, 256, tq2_0_codes>("TQ2_0", "codes"),
      part<66, 4, negative_halves<64>>("TQ2_0", "scales"),     part<36, 64, nvfp4_codes>("NVFP4", "codes"),
      part<36, 4, copy<0, 4>>("NVFP4", "scales"),         part<98, 128, iq3_xxs_words>("IQ3_XXS", "codes"),
      part<98, 32, grid_scales<66, 4>>("IQ3_XXS", "scales"),     part<66, 64, copy<2, 64>>("IQ2_XXS", "codes"),
      part<66, 32, grid_scales<6, 8>>("IQ2_XXS", "scales"),
      part<74, 64, copy<2, 64>>("IQ2_XS", "codes"),       part<74, 64, nibble_scales<66, 16>>("IQ2_XS", "scales"),
      part<82, 128, iq2_s_words>("IQ2_S", "codes"),       part<82, 64, nibble_scales<74, 16>>("IQ2_S", "scales"),
      part<50, 64, iq1_s_words>("IQ1_S", "codes"),        part<50, 32, iq1_s_scales>("IQ1_S", "scales"),
      part<56, 64, iq1_m_words>("IQ1_M", "codes"),        part<56, 64, iq1_m_scales>("IQ1_M", "scales"),
      part<110, 128, iq3_s_words>("IQ3_S", "codes"),      part<110, 32, nibble_scales<106, 8>>("IQ3_S", "scales"),
  };
  return parts;
}

const GgufPart& gguf_part(const std::string& type, const std::string& part) {
  for (const GgufPart& known : gguf_parts()) {
    if (type == known.type && part == known.part) return known;
  }
  throw std::invalid_argument("blocks of GGUF type " + type + " have no part '" + part + "' that a packed format keeps");
}

}  // namespace moebius
