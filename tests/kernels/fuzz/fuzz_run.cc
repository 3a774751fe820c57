#include "tests/kernels/fuzz/fuzz_run.h"

#include <array>
#include <cmath>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>

#include "kernels/format/dequantise.h"
#include "kernels/format/pack.h"
#include "tests/kernels/fuzz/fuzz_golden.h"
#include "tests/kernels/fuzz/fuzz_source.h"
#include "kernels/moe/expert_engine.h"
#include "kernels/testing/random_weights.h"

namespace moebius::fuzz {
namespace {

void check(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error(what);
}

// Runs all of them at once and rethrows what the first of them threw.
void run_together(const std::vector<std::function<void()>>& functions) {
  std::vector<std::exception_ptr> errors(functions.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < functions.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        functions[i]();
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

struct ExpertSources {
  FuzzSource gate, up, down;

  ExpertSource view() const { return {gate.matrix, up.matrix, down.matrix}; }
};

ExpertSources draw_expert(const EngineOptions& options, Random& random) {
  const uint32_t hidden = options.hidden_size;
  const uint32_t intermediate = options.intermediate_size;
  const LayerFormats& formats = options.formats[0];
  ExpertSources sources;
  if (options.is_gated()) sources.gate = draw_source(formats.gate_up.gate, intermediate, hidden, options.has_bias, random);
  sources.up = draw_source(formats.gate_up.up, intermediate, hidden, options.has_bias, random);
  sources.down = draw_source(formats.down, hidden, intermediate, options.has_bias, random);
  return sources;
}

// Where packing is exact the packed form means what the source means, bit for bit.
void check_packing(const SourceMatrix& source, const WeightFormat& format, const std::vector<float>& unpacked,
                   const char* name) {
  if (!packs_exactly(source, format)) return;
  std::vector<float> row(source.cols);
  for (uint32_t r = 0; r < source.rows; ++r) {
    dequantise_row(source, r, row.data());
    for (uint32_t k = 0; k < source.cols; ++k) {
      const float packed = unpacked[size_t{r} * source.cols + k];
      check(packed == row[k] || (std::isnan(packed) && std::isnan(row[k])),
            std::string(name) + " [" + std::to_string(r) + ", " + std::to_string(k) + "] is packed as " +
                std::to_string(packed) + ", not " + std::to_string(row[k]));
    }
  }
}

void load_experts(ExpertEngine& engine, const std::vector<ExpertSources>& sources) {
  const uint32_t begin = engine.options().expert_begin;
  auto load = [&](uint32_t first) {
    for (uint32_t i = first; i < sources.size(); i += 2) engine.load_expert(0, begin + i, sources[i].view());
  };
  run_together({[&] { load(0); }, [&] { load(1); }});
}

std::vector<UnpackedExpert> fill_engine(const FuzzCase& fuzz, ExpertEngine& engine, Random& random) {
  const EngineOptions& options = fuzz.options;
  const LayerFormats& formats = options.formats[0];
  std::vector<ExpertSources> sources;
  if (fuzz.from_sources) {
    for (uint32_t i = 0; i < options.num_experts; ++i) sources.push_back(draw_expert(options, random));
    load_experts(engine, sources);
  } else {
    fill_random(engine, 0, fuzz.seed);
  }
  std::vector<UnpackedExpert> experts;
  for (uint32_t i = 0; i < options.num_experts; ++i) {
    experts.push_back(unpack_expert(engine.store().layout(0), engine.packed_expert(0, options.expert_begin + i)));
    if (!fuzz.from_sources) continue;
    if (options.is_gated()) check_packing(sources[i].gate.matrix, formats.gate_up.gate, experts[i].gate, "gate");
    check_packing(sources[i].up.matrix, formats.gate_up.up, experts[i].up, "up");
    check_packing(sources[i].down.matrix, formats.down, experts[i].down, "down");
  }
  return experts;
}

void compare(const FuzzCase& fuzz, const Golden& golden, const std::vector<float>& output) {
  for (size_t i = 0; i < output.size(); ++i) {
    const size_t hidden = fuzz.options.hidden_size;
    const std::string where = "output [" + std::to_string(i / hidden) + ", " + std::to_string(i % hidden) + "] is " +
                              std::to_string(output[i]);
    if (!std::isfinite(golden.output[i])) {
      check(!std::isfinite(output[i]), where + ", which hides a NaN");
      continue;
    }
    // The last term: results near the smallest normal number may be flushed to zero.
    const double bound = golden.bound[i] + 1e-30;
    check(std::abs(output[i] - golden.output[i]) <= bound,
          where + ", not " + std::to_string(golden.output[i]) + " within " + std::to_string(bound));
  }
}

void check_stats(const FuzzCase& fuzz, const FuzzRequest& request, const ExpertEngine& engine, uint64_t calls) {
  const EngineStats& stats = engine.stats();
  check(stats.calls == calls && stats.rows == calls * fuzz.rows, "calls or rows were counted wrong");
  uint64_t held = 0;
  bool nan_row_held = false;
  for (size_t pair = 0; pair < request.ids.size(); ++pair) {
    const int64_t index = int64_t{request.ids[pair]} - fuzz.options.expert_begin;
    if (index < 0 || index >= fuzz.options.num_experts) continue;
    ++held;
    nan_row_held |= pair / fuzz.top_k == request.nan_row;
  }
  uint64_t counted = 0;
  for (const auto& rows : stats.expert_rows) counted += rows;
  check(counted == calls * held, "rows of experts were counted wrong");
  const uint64_t outputs = nan_row_held ? calls * fuzz.options.hidden_size : 0;
  check(stats.nonfinite_outputs == outputs,
        "NaN outputs: " + std::to_string(stats.nonfinite_outputs) + " counted, not " + std::to_string(outputs));
  check(nan_row_held ? stats.nonfinite_inputs == calls : stats.nonfinite_inputs <= (fuzz.with_nan ? calls : 0),
        "NaN inputs: " + std::to_string(stats.nonfinite_inputs) + " counted");
}

}  // namespace

void run_case(const FuzzCase& fuzz) {
  Random random(fuzz.seed ^ 0x5eed);
  // Not on the stack, where the address sanitizer of some builds of GCC 12 and 13 (Ubuntu 24.04's) misplaces what is
  // aligned to 64 bytes.
  const auto owned = std::make_unique<ExpertEngine>(fuzz.options);
  ExpertEngine& engine = *owned;
  const std::vector<UnpackedExpert> experts = fill_engine(fuzz, engine, random);
  if (fuzz.calibrate) engine.calibrate();
  const FuzzRequest request = draw_request(fuzz, random);
  const size_t size = size_t{fuzz.rows} * fuzz.options.hidden_size;
  std::array<std::vector<float>, 2> outputs;
  std::vector<std::function<void()>> callers;
  for (uint32_t i = 0; i < (fuzz.two_callers ? 2u : 1u); ++i) {
    outputs[i] = std::vector<float>(size, 12345.0f);
    callers.push_back([&, i] { engine.forward(request.view(fuzz), outputs[i].data()); });
  }
  if (callers.size() == 1) {
    callers[0]();
  } else {
    run_together(callers);
    check(std::memcmp(outputs[0].data(), outputs[1].data(), size * sizeof(float)) == 0, "two equal calls differ");
  }
  compare(fuzz, compute_golden(fuzz, request, experts), outputs[0]);
  check_stats(fuzz, request, engine, callers.size());
}

}  // namespace moebius::fuzz
