// Sources whose rows run along k: tiles of 16 rows x 16 words, made words where they are not, then transposed.
#include <algorithm>
#include <bit>

#include "kernels/format/pack_lines.h"
#include "kernels/format/source_access.h"
#include "kernels/format/transpose_words.h"

namespace moebius {
namespace {

constexpr uint32_t kTileLines = 16;
constexpr uint32_t kPrefetchBytes = 512;  // of a row, ahead of the tile

// What a row's bytes are: the panel's words, the same with nibbles in order of k, one 4-bit code a byte, or
// halves to widen to float32.
enum class RowKind { kWords, kNibbles, kCodeBytes, kBFloat16, kFloat16 };

RowKind kind_of(const SourceMatrix& source, Code target) {
  if (source.code != target) return source.code == Code::kBFloat16 ? RowKind::kBFloat16 : RowKind::kFloat16;
  if (code_bits(target) > 4) return RowKind::kWords;
  return source.layout == SourceLayout::kPlain ? RowKind::kCodeBytes : RowKind::kNibbles;
}

size_t bytes_per_line(RowKind kind) {
  if (kind == RowKind::kCodeBytes) return 8;
  return kind == RowKind::kBFloat16 || kind == RowKind::kFloat16 ? 2 : 4;
}

// Bytes k k+2 | k+4 k+6 | k+1 k+3 | k+5 k+7 join to the four bytes of a panel's word.
void join_code_bytes(const std::byte* codes, uint32_t num_words, uint32_t* words) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  for (uint32_t word = 0; word < num_words; word += 4) {
    __m128i joined[2];
    for (uint32_t i = 0; i < 2; ++i) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + size_t{word} * 8 + i * 16));
      const __m128i ordered = _mm_shuffle_epi8(_mm_and_si128(bytes, _mm_set1_epi8(15)), order);
      joined[i] = _mm_maddubs_epi16(ordered, _mm_set1_epi16(0x1001));
    }
    _mm_store_si128(reinterpret_cast<__m128i*>(words + word), _mm_packus_epi16(joined[0], joined[1]));
  }
}

template <float (*kDecode)(uint16_t)>
void widen(const std::byte* halves, uint32_t num_words, uint32_t* words) {
  for (uint32_t i = 0; i < num_words; ++i) {
    words[i] = std::bit_cast<uint32_t>(kDecode(load_element<uint16_t>(halves, i)));
  }
}

void stage(RowKind kind, const std::byte* row, uint32_t num_words, uint32_t* words) {
  if (kind == RowKind::kCodeBytes) return join_code_bytes(row, num_words, words);
  kind == RowKind::kBFloat16 ? widen<decode_bfloat16>(row, num_words, words)
                             : widen<decode_float16>(row, num_words, words);
}

// `lines` are at most kTileLines, a multiple of 4, every k of which exists.
void pack_tile(const SourceMatrix& source, RowKind kind, Code code, const LineRange& lines, std::byte* target) {
  alignas(64) static constexpr std::array<uint32_t, kTileLines> kZeroWords = {};
  alignas(64) static constexpr std::array<uint32_t, kTileLines> kInt4Words = {
      0x88888888, 0x88888888, 0x88888888, 0x88888888, 0x88888888, 0x88888888, 0x88888888, 0x88888888,
      0x88888888, 0x88888888, 0x88888888, 0x88888888, 0x88888888, 0x88888888, 0x88888888, 0x88888888};
  alignas(64) uint32_t staged[kPanelColumns][kTileLines];
  const std::byte* rows[kPanelColumns];
  const bool in_place = kind == RowKind::kWords || kind == RowKind::kNibbles;
  const uint32_t num_lines = lines.end - lines.begin;
  const auto stride = source.row_stride * static_cast<ptrdiff_t>(source_unit_bytes(source));
  for (uint32_t column = 0; column < kPanelColumns; ++column) {
    const uint32_t row = lines.panel * kPanelColumns + column;
    if (row >= source.rows) {
      rows[column] = reinterpret_cast<const std::byte*>(code == Code::kInt4 ? kInt4Words.data() : kZeroWords.data());
      continue;
    }
    rows[column] = static_cast<const std::byte*>(source.data) + row * stride + lines.begin * bytes_per_line(kind);
    __builtin_prefetch(rows[column] + kPrefetchBytes);
    if (in_place) continue;
    stage(kind, rows[column], num_lines, staged[column]);
    rows[column] = reinterpret_cast<const std::byte*>(staged[column]);
  }
  transpose_words(rows, num_lines, kind == RowKind::kNibbles, target);
}

}  // namespace

void pack_lines_row_major(const SourceMatrix& source, const PanelLayout& layout, const LineRange& lines,
                          std::byte* target) {
  const RowKind kind = kind_of(source, layout.format.code);
  const uint32_t whole = std::min(lines.end, source.cols / (32 / code_bits(layout.format.code)));
  uint32_t line = lines.begin;
  while (line + 4 <= whole) {
    const uint32_t end = line + std::min(kTileLines, (whole - line) / 4 * 4);
    pack_tile(source, kind, layout.format.code, {lines.panel, line, end}, target);
    target += size_t{end - line} * 64;
    line = end;
  }
  pack_lines_reference(source, layout, {lines.panel, line, lines.end}, target);
}

}  // namespace moebius
