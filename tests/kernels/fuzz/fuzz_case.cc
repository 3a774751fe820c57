#include "tests/kernels/fuzz/fuzz_case.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/format/numbers.h"
#include "kernels/isa/isa.h"
#include "kernels/testing/gemm_emulated.h"

namespace moebius::fuzz {
namespace {

constexpr uint64_t kMostProducts = 3'000'000;  // rows * top_k * hidden * intermediate: what a golden takes long for

template <class T>
const T& any_of(const std::vector<T>& values, Random& random) {
  return values[random.below(static_cast<uint32_t>(values.size()))];
}

// A GEMM kernel that computes one of the matrices at least, or null.
const GemmKernel* draw_kernel(const LayerFormats& formats, Random& random) {
  std::vector<const GemmKernel*> found{nullptr};
  for (const GemmKernel* kernel : testable_gemms()) {
    const bool fits = kernel->supports(formats.gate_up.up) || kernel->supports(formats.down);
    if (fits && kernel->row_type != RowType::kInt8) found.push_back(kernel);
  }
  return random.one_in(3) ? nullptr : any_of(found, random);
}

EngineOptions draw_options(Random& random) {
  const std::vector<std::string> names = weight_format_names();
  EngineOptions options;
  options.hidden_size = random.size(300);
  options.intermediate_size = random.size(200);
  options.num_experts = random.one_in(4) ? 1 : random.between(2, 9);
  options.num_layers = 1;
  options.expert_begin = random.one_in(3) ? random.below(20) : 0;
  const WeightFormat up = parse_weight_format(any_of(names, random));
  options.formats = {{{up, up}, random.one_in(3) ? parse_weight_format(any_of(names, random)) : up}};
  options.activation = static_cast<Activation>(random.below(5));
  const WeightFormat gate = parse_weight_format(any_of(names, random));
  if (options.is_gated() && !up.quantised_rows && !gate.quantised_rows && random.one_in(3)) {
    options.formats[0].gate_up.gate = gate;
  }
  options.limits = {random.one_in(2) ? 7.0f : 0.5f};
  options.has_bias = random.one_in(2);
  options.num_threads = random.between(1, 5);
  std::vector<std::string> levels{"auto"};
  for (const Isa isa : supported_isas()) levels.push_back(isa_name(isa));
  options.isa = any_of(levels, random);
  if (options.isa == "auto") options.kernel = draw_kernel(options.formats[0], random);
  return options;
}

uint16_t to_bfloat16(float value) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16); }

// Values with 8 significant bits in [2^-10, 2^4] are float16 as well: take the bfloat16 and move its exponent.
uint16_t to_float16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000;
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  const int32_t exponent = static_cast<int32_t>(bits >> 23 & 255) - 127 + 15;
  if (exponent <= 0) return static_cast<uint16_t>(sign);
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(exponent) << 10 | (bits >> 13 & 0x3ff));
}

int32_t draw_id(const FuzzCase& fuzz, uint32_t few, Random& random) {
  const EngineOptions& options = fuzz.options;
  const auto begin = static_cast<int32_t>(options.expert_begin);
  const auto local = static_cast<int32_t>(options.num_experts);
  switch (fuzz.routing) {
    case Routing::kOneExpert: return begin + static_cast<int32_t>(few);
    case Routing::kFewExperts: return begin + static_cast<int32_t>((few + random.below(2)) % options.num_experts);
    case Routing::kNone: return random.one_in(2) ? -1 : begin + local + static_cast<int32_t>(random.below(5));
    case Routing::kSkipping:
      if (random.one_in(2)) return random.one_in(2) ? -1 : begin + local;
      break;
    case Routing::kUniform: break;
  }
  return begin + static_cast<int32_t>(random.below(options.num_experts));
}

}  // namespace

FuzzCase draw_case(uint64_t seed) {
  Random random(seed);
  FuzzCase fuzz;
  fuzz.seed = seed;
  fuzz.options = draw_options(random);
  fuzz.from_sources = !random.one_in(3);
  fuzz.calibrate = random.one_in(200);
  fuzz.two_callers = random.one_in(4);
  fuzz.top_k = random.between(1, std::min(4u, fuzz.options.num_experts));
  fuzz.routing = static_cast<Routing>(random.below(5));
  fuzz.dtype = static_cast<DType>(random.between(1, 3));
  fuzz.with_nan = random.one_in(6);
  const uint64_t row = uint64_t{fuzz.top_k} * fuzz.options.hidden_size * fuzz.options.intermediate_size;
  fuzz.rows = random.size(static_cast<uint32_t>(std::clamp<uint64_t>(kMostProducts / row, 1, 600)));
  return fuzz;
}

FuzzRequest draw_request(const FuzzCase& fuzz, Random& random) {
  FuzzRequest request;
  const uint32_t few = random.below(fuzz.options.num_experts);
  for (uint32_t i = 0; i < fuzz.rows * fuzz.top_k; ++i) {
    request.ids.push_back(draw_id(fuzz, few, random));
    request.weights.push_back(random.one_in(20) ? 0.0f : random.normal());
  }
  if (fuzz.with_nan) request.nan_row = random.below(fuzz.rows);
  const uint32_t nan_column = random.below(fuzz.options.hidden_size);
  for (uint32_t i = 0; i < fuzz.rows * fuzz.options.hidden_size; ++i) {
    const bool is_nan = request.nan_row == i / fuzz.options.hidden_size && nan_column == i % fuzz.options.hidden_size;
    const float value = is_nan ? std::numeric_limits<float>::quiet_NaN() : random.normal();
    if (fuzz.dtype == DType::kFloat32) {
      request.rows.push_back(value);
      continue;
    }
    const bool bfloat16 = fuzz.dtype == DType::kBFloat16;
    request.half_rows.push_back(bfloat16 ? to_bfloat16(value) : to_float16(value));
    request.rows.push_back(bfloat16 ? decode_bfloat16(request.half_rows.back())
                                    : decode_float16(request.half_rows.back()));
  }
  request.half_rows.shrink_to_fit();
  request.rows.shrink_to_fit();
  return request;
}

ExpertRequest FuzzRequest::view(const FuzzCase& fuzz) const {
  const void* data = fuzz.dtype == DType::kFloat32 ? static_cast<const void*>(rows.data()) : half_rows.data();
  return {0, fuzz.rows, fuzz.dtype, data, ids.data(), weights.data(), fuzz.top_k};
}

std::string FuzzCase::describe() const {
  static const char* const kRoutings[] = {"uniform", "one expert", "few experts", "skipping", "none"};
  static const char* const kActivations[] = {"silu", "silu_clamped", "gpt_oss", "relu2", "gelu_tanh", "clamped_silu"};
  static const char* const kTypes[] = {"", "float32", "bfloat16", "float16"};
  const EngineOptions& o = options;
  auto text = [](uint32_t value) { return std::to_string(value); };
  return "hidden " + text(o.hidden_size) + ", intermediate " + text(o.intermediate_size) + ", experts " +
         text(o.num_experts) + ", rows " + text(rows) + ", top_k " + text(top_k) + ", formats " +
         gate_up_formats_name(o.formats[0].gate_up) + " and " + weight_format_name(o.formats[0].down) + ", " +
         kActivations[static_cast<size_t>(o.activation)] + (o.has_bias ? " with bias" : "") + ", " +
         kTypes[static_cast<size_t>(dtype)] + " rows, routing " + kRoutings[static_cast<size_t>(routing)] +
         ", threads " + text(o.num_threads) + ", isa " + o.isa + ", kernel " + (o.kernel == nullptr ? "auto" : o.kernel->name) + (from_sources ? ", from sources" : "") +
         (two_callers ? ", two callers" : "") + (calibrate ? ", calibrated" : "") + (with_nan ? ", with a NaN" : "");
}

}  // namespace moebius::fuzz
