// One random engine and one random request, both given by a seed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/kernels/fuzz/random.h"
#include "kernels/moe/engine_options.h"
#include "kernels/moe/expert_backend.h"

namespace moebius::fuzz {

enum class Routing : uint8_t { kUniform, kOneExpert, kFewExperts, kSkipping, kNone };

// Filled by draw_case.
struct FuzzCase {
  uint64_t seed = 0;
  EngineOptions options;        // of one layer
  bool from_sources = false;    // experts packed from checkpoint-like matrices; else filled by the engine
  bool calibrate = false;
  bool two_callers = false;     // forward() from two threads at once
  uint32_t rows = 0;
  uint32_t top_k = 0;
  DType dtype = DType::kFloat32;
  Routing routing = Routing::kUniform;
  bool with_nan = false;        // one row holds a NaN

  std::string describe() const;
};

FuzzCase draw_case(uint64_t seed);

// Filled by draw_request. Buffers have exactly the size that the engine may touch.
struct FuzzRequest {
  std::vector<uint16_t> half_rows;   // [rows, hidden], bfloat16 and float16 requests
  std::vector<float> rows;           // [rows, hidden], the same values
  std::vector<int32_t> ids;          // [rows, top_k]
  std::vector<float> weights;        // [rows, top_k]
  uint32_t nan_row = UINT32_MAX;

  ExpertRequest view(const FuzzCase& fuzz) const;
};

FuzzRequest draw_request(const FuzzCase& fuzz, Random& random);

}  // namespace moebius::fuzz
