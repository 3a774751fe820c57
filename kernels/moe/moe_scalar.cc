// Scalar reference: the same layout and the same order of summation as the vector kernels, as plainly as
// possible. Products are rounded before they are added (no fused multiply-add in the baseline).
#include <bit>
#include <cmath>

#include "kernels/moe/kernel_table.h"

namespace moebius {
namespace {

constexpr uint32_t kLanes = 8;

struct Float32Panel {
  static constexpr size_t kBytesPerK = 2 * kLanes * sizeof(float);
  static float low(const void* panel, size_t k, uint32_t lane) {
    return static_cast<const float*>(panel)[k * 2 * kLanes + lane];
  }
  static float high(const void* panel, size_t k, uint32_t lane) { return low(panel, k, lane + kLanes); }
};

struct BFloat16Panel {
  static constexpr size_t kBytesPerK = kLanes * sizeof(uint32_t);
  static uint32_t pair(const void* panel, size_t k, uint32_t lane) {
    return static_cast<const uint32_t*>(panel)[k * kLanes + lane];
  }
  static float low(const void* panel, size_t k, uint32_t lane) {
    return std::bit_cast<float>(pair(panel, k, lane) << 16);
  }
  static float high(const void* panel, size_t k, uint32_t lane) {
    return std::bit_cast<float>(pair(panel, k, lane) & 0xffff0000u);
  }
};

template <class Panel>
void dot(const void* panel, const float* row, uint32_t k, uint32_t lane, float* low, float* high) {
  float low_sum = 0.0f;
  float high_sum = 0.0f;
  for (uint32_t i = 0; i < k; ++i) {
    low_sum += row[i] * Panel::low(panel, i, lane);
    high_sum += row[i] * Panel::high(panel, i, lane);
  }
  *low = low_sum;
  *high = high_sum;
}

template <class Panel>
void gate_up(const GateUpWork& work) {
  for (uint32_t p = 0; p < work.num_panels; ++p) {
    const void* panel = static_cast<const char*>(work.panels) + p * (work.k * Panel::kBytesPerK);
    for (uint32_t i = 0; i < work.num_rows; ++i) {
      float* activation = work.activation + i * work.activation_stride + p * kLanes;
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        float gate, up;
        dot<Panel>(panel, work.rows[i], work.k, lane, &gate, &up);
        activation[lane] = gate / (1.0f + std::exp(-gate)) * up;
      }
    }
  }
}

template <class Panel>
void down(const DownWork& work) {
  for (uint32_t p = 0; p < work.num_panels; ++p) {
    const void* panel = static_cast<const char*>(work.panels) + p * (work.k * Panel::kBytesPerK);
    for (uint32_t i = 0; i < work.num_rows; ++i) {
      float* output = work.output + work.row_ids[i] * work.output_stride;
      for (uint32_t lane = 0; lane < kLanes; ++lane) {
        float low, high;
        dot<Panel>(panel, work.activation + i * work.activation_stride, work.k, lane, &low, &high);
        const uint32_t column = p * 2 * kLanes + lane;
        if (column < work.num_columns) output[column] += work.weights[i] * low;
        if (column + kLanes < work.num_columns) output[column + kLanes] += work.weights[i] * high;
      }
    }
  }
}

}  // namespace

const KernelTable& kernel_table_scalar() {
  static constexpr KernelTable kTable{kLanes, gate_up<Float32Panel>, gate_up<BFloat16Panel>, down<Float32Panel>,
                                      down<BFloat16Panel>};
  return kTable;
}

}  // namespace moebius
