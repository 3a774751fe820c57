// Rows of the grids that GGUF's IQ types name by number: magnitudes of four or eight neighbouring weights, one a byte,
// in whole numbers times the code's unit. Those of IQ1 are int8, to which 1 is added or of which 1 is taken. Data only: any file may read it, whatever instruction set it is built for.
#pragma once

#include <cstdint>

#include "kernels/format/panel_layout.h"

namespace moebius {

// The first weight in the lowest byte.
template <class Row, uint32_t kCount>
struct Grid {
  alignas(64) Row rows[kCount];
};
extern const Grid<uint32_t, 256> kIq3XxsGrid;
extern const Grid<uint32_t, 512> kIq3SGrid;
extern const Grid<uint64_t, 256> kIq2XxsGrid;
extern const Grid<uint64_t, 512> kIq2XsGrid;
extern const Grid<uint64_t, 1024> kIq2SGrid;
extern const Grid<uint64_t, 2048> kIq1Grid;

template <Code kCode>
constexpr float kGridUnit = 0.125f;
template <>
inline constexpr float kGridUnit<Code::kIq3Xxs> = 0.5f;
template <>
inline constexpr float kGridUnit<Code::kIq3S> = 1.0f;
template <>
inline constexpr float kGridUnit<Code::kTq1> = 1.0f;

struct GridRows {
  const void* rows = nullptr;  // bytes [count][width]; null of other codes, and of tq1
  uint32_t count = 0;
  uint32_t width = 0;
  float unit = 1.0f;
};
GridRows grid_rows(Code code);

// Places of the magnitudes: of iq3_xxs in 4 bits, of iq2_xxs in 2, the first weight's lowest.
struct GridPlaces {
  alignas(64) uint8_t first[256];  // of the first half of a row
  alignas(64) uint8_t second[256];
};
extern const GridPlaces kIq3XxsPlaces;
extern const GridPlaces kIq2XxsPlaces;

// What GEMMs make of rows of a grid before they multiply (kernels/gemm/grid_gemm.inc.h): int8 with the same products as
// scales, and the code's unit as the scale of every column. Other formats are themselves.
WeightFormat expanded_format(const WeightFormat& format);
PanelLayout expanded_layout(const PanelLayout& layout);

}  // namespace moebius
