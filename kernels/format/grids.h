// Rows of the grids that GGUF's IQ types name by number: magnitudes of four or eight neighbouring weights, one a byte,
// in whole numbers times the code's unit. Data only: any file may read it, whatever instruction set it is built for.
#pragma once

#include <cstdint>

#include "kernels/format/panel_layout.h"

namespace moebius {

constexpr uint32_t kGridRows = 256;

struct Grid4 {
  alignas(64) uint32_t rows[kGridRows];
};
struct Grid8 {
  alignas(64) uint64_t rows[kGridRows];
};

// The first weight in the lowest byte.
extern const Grid4 kIq3XxsGrid;
extern const Grid8 kIq2XxsGrid;

// Places of the magnitudes: of iq3_xxs in 4 bits, of iq2_xxs in 2, the first weight's lowest.
struct GridPlaces {
  alignas(64) uint8_t first[kGridRows];  // of the first half of a row
  alignas(64) uint8_t second[kGridRows];
};
extern const GridPlaces kIq3XxsPlaces;
extern const GridPlaces kIq2XxsPlaces;

constexpr float kIq3XxsUnit = 0.5f;
constexpr float kIq2XxsUnit = 0.125f;

// What GEMMs make of rows of a grid before they multiply (kernels/gemm/grid_gemm.inc.h): int8 with the same products as
// scales, and the code's unit as the scale of every column. Other formats are themselves.
WeightFormat expanded_format(const WeightFormat& format);
PanelLayout expanded_layout(const PanelLayout& layout);

}  // namespace moebius
