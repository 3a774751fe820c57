#include <pybind11/stl.h>

#include "kernels/bindings/bindings.h"
#include "kernels/bindings/numpy_checks.h"
#include "kernels/bindings/released_gil.h"
#include "kernels/bindings/source_arrays.h"
#include "kernels/gemm/registry.h"
#include "kernels/isa/isa.h"
#include "kernels/moe/expert_engine.h"

namespace py = pybind11;

namespace moebius {
namespace {

uint32_t unsigned_option(int64_t value, const char* name) {
  if (value >= 0 && value <= INT32_MAX) return static_cast<uint32_t>(value);
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be 0 to 2147483647");
}

std::vector<LayerFormats> parse_formats(const std::vector<std::string>& gate_up, const std::vector<std::string>& down) {
  const size_t count = std::max(gate_up.size(), down.size());
  if ((gate_up.size() != count && gate_up.size() != 1) || (down.size() != count && down.size() != 1)) {
    throw std::invalid_argument("weight_format names " + std::to_string(gate_up.size()) + " formats and down_format " +
                                std::to_string(down.size()) + "; they must be as many, or one");
  }
  std::vector<LayerFormats> formats;
  for (size_t i = 0; i < count; ++i) {
    formats.push_back({parse_gate_up_formats(gate_up[gate_up.size() == 1 ? 0 : i]),
                       parse_weight_format(down[down.size() == 1 ? 0 : i])});
  }
  return formats;
}

std::shared_ptr<ExpertEngine> make_engine(int64_t hidden_size, int64_t intermediate_size, int64_t num_experts,
                                          int64_t num_layers, int64_t expert_begin,
                                          const std::vector<std::string>& weight_format,
                                          const std::vector<std::string>& down_format, const std::string& activation,
                                          float alpha, const std::vector<float>& limit, bool has_bias,
                                          int64_t num_threads, const std::vector<int>& cpus, int numa_node,
                                          const std::string& isa, const py::object& kernel, const std::string& segment_path,
                                          const std::string& segment_identity, int64_t intermediate_begin,
                                          const std::vector<std::vector<uint32_t>>& held, uint64_t slot_bytes) {
  EngineOptions options;
  options.hidden_size = unsigned_option(hidden_size, "hidden_size");
  options.intermediate_size = unsigned_option(intermediate_size, "intermediate_size");
  options.num_experts = unsigned_option(num_experts, "num_experts");
  options.num_layers = unsigned_option(num_layers, "num_layers");
  options.expert_begin = unsigned_option(expert_begin, "expert_begin");
  options.formats = parse_formats(weight_format, down_format);
  options.activation = parse_activation(activation);
  options.alpha = alpha;
  options.limits = limit;
  options.has_bias = has_bias;
  options.num_threads = unsigned_option(num_threads, "num_threads");
  options.cpus = cpus;
  options.numa_node = numa_node;
  options.isa = isa;
  options.segment = {segment_path, segment_identity, unsigned_option(intermediate_begin, "intermediate_begin"), held,
                     slot_bytes};
  if (!py::isinstance<py::str>(kernel)) {
    options.kernel = kernel.cast<const GemmKernel*>();
  } else if (const auto name = kernel.cast<std::string>(); name != "auto") {
    options.kernel = &gemm_by_name(name.c_str());
  }
  return std::make_shared<ExpertEngine>(options);
}

SourceArrays read_matrix(const py::object& source, const char* name, uint32_t rows, uint32_t cols) {
  SourceArrays arrays = read_source(source, name);
  if (arrays.matrix.rows == rows && arrays.matrix.cols == cols) return arrays;
  throw std::invalid_argument(std::string(name) + " has shape " + shape_text({arrays.matrix.rows, arrays.matrix.cols}) +
                              "; it must be " + shape_text({rows, cols}));
}

// An expert's matrices as Python gives them; keeps the arrays.
struct GivenExpert {
  GivenExpert(const EngineOptions& options, const py::object& given_gate, const py::object& given_up,
              const py::object& given_down) {
    if (given_gate.is_none() == options.is_gated()) {
      throw std::invalid_argument(options.is_gated() ? "gate is None; only the activation relu2 does without"
                                                     : "gate is given; the activation relu2 has none");
    }
    if (!given_gate.is_none()) gate = read_matrix(given_gate, "gate", options.intermediate_size, options.hidden_size);
    up = read_matrix(given_up, "up", options.intermediate_size, options.hidden_size);
    down = read_matrix(given_down, "down", options.hidden_size, options.intermediate_size);
    source = {gate.matrix, up.matrix, down.matrix};
  }

  SourceArrays gate, up, down;
  ExpertSource source;
};

py::tuple load_expert(ExpertEngine& engine, int64_t layer, int64_t expert, const py::object& gate, const py::object& up,
                      const py::object& down) {
  const GivenExpert given(engine.options(), gate, up, down);
  const uint32_t layer_index = unsigned_option(layer, "layer");
  const uint32_t expert_index = unsigned_option(expert, "expert");
  PackError error;
  {
    const ReleasedGil release;
    error = engine.load_expert(layer_index, expert_index, given.source);
  }
  return py::make_tuple(error.squared_error, error.squared_reference);
}

bool repair_expert(ExpertEngine& engine, int64_t layer, int64_t expert, const py::object& gate, const py::object& up,
                   const py::object& down) {
  const GivenExpert given(engine.options(), gate, up, down);
  const uint32_t layer_index = unsigned_option(layer, "layer");
  const uint32_t expert_index = unsigned_option(expert, "expert");
  const ReleasedGil release;
  return engine.repair_expert(layer_index, expert_index, given.source);
}

// (layer, expert), or None.
py::object wait_for_damage(ExpertEngine& engine, double seconds) {
  const auto found = [&] {
    const ReleasedGil release;
    return engine.wait_for_damage(std::chrono::nanoseconds(static_cast<int64_t>(std::max(seconds, 0.0) * 1e9)));
  }();
  if (!found) return py::none();
  return py::make_tuple(found->first, found->second);
}

// A view; it keeps the engine alive.
py::array packed_expert(const std::shared_ptr<ExpertEngine>& engine, int64_t layer, int64_t expert) {
  const uint32_t layer_index = unsigned_option(layer, "layer");
  const auto* packed =
      reinterpret_cast<const uint8_t*>(engine->packed_expert(layer_index, unsigned_option(expert, "expert")));
  const auto bytes = static_cast<py::ssize_t>(engine->store().layout(layer_index).expert_bytes);
  py::array_t<uint8_t> view(bytes, packed, py::cast(engine));
  view.attr("setflags")(py::arg("write") = false);
  return view;
}

py::array_t<float> output_array(const py::object& output, py::ssize_t rows, py::ssize_t columns) {
  if (output.is_none()) return py::array_t<float>({rows, columns});
  if (!py::isinstance<py::array_t<float, py::array::c_style>>(output)) {
    throw std::invalid_argument("output must be a C-contiguous numpy array of float32");
  }
  auto array = py::reinterpret_borrow<py::array_t<float>>(output);
  check_shape(array, "output", {rows, columns});
  if (!array.writeable()) throw std::invalid_argument("output is read-only");
  return array;
}

py::array_t<float> forward(ExpertEngine& engine, int64_t layer, const py::array& hidden_states,
                           const py::array& topk_ids, const py::array& topk_weights, const py::object& output) {
  if (hidden_states.ndim() != 2) throw std::invalid_argument("hidden_states must be [rows, hidden_size]");
  if (topk_ids.ndim() != 2) throw std::invalid_argument("topk_ids must be [rows, top_k]");
  const py::ssize_t rows = hidden_states.shape(0);
  const py::ssize_t top_k = topk_ids.shape(1);
  check_shape(hidden_states, "hidden_states", {rows, static_cast<py::ssize_t>(engine.hidden_size())});
  check_shape(topk_ids, "topk_ids", {rows, top_k});
  check_shape(topk_weights, "topk_weights", {rows, top_k});
  const FloatArray hidden(hidden_states, "hidden_states");
  const auto ids = contiguous<int32_t>(topk_ids, "topk_ids", "int32");
  const auto weights = contiguous<float>(topk_weights, "topk_weights", "float32");
  py::array_t<float> result = output_array(output, rows, hidden_states.shape(1));
  const ExpertRequest request{unsigned_option(layer, "layer"), static_cast<uint32_t>(rows), hidden.dtype,
                              hidden.array.data(), ids.data(), weights.data(), static_cast<uint32_t>(top_k)};
  float* const target = result.mutable_data();
  {
    const ReleasedGil release;
    engine.forward(request, target);
  }
  return result;
}

py::array_t<uint64_t> counters(const std::vector<std::atomic<uint64_t>>& source, std::vector<py::ssize_t> shape) {
  py::array_t<uint64_t> result(std::move(shape));
  for (size_t i = 0; i < source.size(); ++i) result.mutable_data()[i] = source[i].load(std::memory_order_relaxed);
  return result;
}

py::dict stats(const ExpertEngine& engine) {
  const EngineStats& source = engine.stats();
  const auto layers = static_cast<py::ssize_t>(engine.options().num_layers);
  const auto experts = static_cast<py::ssize_t>(engine.options().num_experts);
  py::dict result;
  result["calls"] = source.calls.load();
  result["rows"] = source.rows.load();
  result["busy_seconds"] = static_cast<double>(source.busy_nanoseconds.load()) * 1e-9;
  result["nonfinite_inputs"] = source.nonfinite_inputs.load();
  result["nonfinite_outputs"] = source.nonfinite_outputs.load();
  result["damaged_experts"] = source.damaged_experts.load();
  result["repaired_experts"] = source.repaired_experts.load();
  result["verified_bytes"] = source.verified_bytes.load();
  const ColdExperts* const cold = engine.store().cold();
  const ColdCounters counted = cold == nullptr ? ColdCounters() : cold->counters();
  result["cold_used"] = counted.used;
  result["cold_missed"] = counted.missed;
  result["cold_read_bytes"] = counted.read_bytes;
  result["cold_waited_seconds"] = static_cast<double>(counted.waited_nanoseconds) * 1e-9 / engine.num_threads();
  result["layer_calls"] = counters(source.layer_calls, {layers});
  result["layer_rows"] = counters(source.layer_rows, {layers});
  result["layer_experts"] = counters(source.layer_experts, {layers});
  result["layer_busy_nanoseconds"] = counters(source.layer_busy_nanoseconds, {layers});
  result["expert_rows"] = counters(source.expert_rows, {layers, experts});
  return result;
}

// (spans [n, 7] with the fields of TaskSpan, how many more there were).
py::tuple stop_trace(ExpertEngine& engine) {
  const auto [spans, dropped] = [&] {
    const ReleasedGil release;
    return engine.stop_trace();
  }();
  py::array_t<int64_t> result({static_cast<py::ssize_t>(spans.size()), py::ssize_t{7}});
  int64_t* to = result.mutable_data();
  for (const TaskSpan& span : spans) {
    for (const int64_t value : {int64_t(span.kind), int64_t(span.worker), int64_t(span.layer), int64_t(span.expert),
                                int64_t(span.rows), span.begin_ns, span.end_ns}) {
      *to++ = value;
    }
  }
  return py::make_tuple(result, dropped);
}

// (squared error, squared reference) of an expert that is packed in the segment; None otherwise.
py::object segment_error(const ExpertEngine& engine, int64_t layer, int64_t expert) {
  const weights::ExpertRecord* found =
      engine.segment_record(unsigned_option(layer, "layer"), unsigned_option(expert, "expert"));
  if (found == nullptr) return py::none();
  return py::make_tuple(found->squared_error, found->squared_reference);
}

// (what was found, what differs, whether it is in memory) of the segment; None without one.
py::object segment_found(const ExpertEngine& engine) {
  const weights::Segment* segment = engine.store().segment();
  if (segment == nullptr) return py::none();
  constexpr const char* kNames[] = {"new", "complete", "partial", "replaced"};
  return py::make_tuple(kNames[static_cast<int>(segment->found())], segment->difference(),
                        segment->in_memory());
}

// Without a format of its own gate is part of "gate_up".
const char* matrix_name(MatrixKind kind, bool mixed) {
  if (kind == MatrixKind::kDown) return "down";
  return kind == MatrixKind::kGate ? "gate" : mixed ? "up" : "gate_up";
}

// (slots of each layer, whether the file is read past the page cache); None: all experts are in memory.
py::object cold_slots(const ExpertEngine& engine) {
  const ColdExperts* cold = engine.store().cold();
  if (cold == nullptr) return py::none();
  std::vector<uint32_t> slots;
  for (uint32_t layer = 0; layer < engine.store().num_layers(); ++layer) slots.push_back(cold->slots(layer));
  return py::make_tuple(slots, cold->is_direct());
}

// Rows of PlanRow in moebius/kernels/__init__.py.
py::list plan(const ExpertEngine& engine) {
  KernelPlan current = [&] {
    const ReleasedGil release;
    return engine.plan();
  }();
  py::list rows;
  for (size_t layout = 0; layout < current.num_layouts(); ++layout) {
    for (const MatrixKind kind : current.kinds(layout)) {
      for (const RequestKind request : {RequestKind::kFloat32, RequestKind::kBFloat16}) {
        const MatrixPlan& matrix = current.matrix(layout, kind, request);
        for (size_t range = 0; range < kRowRanges.size(); ++range) {
          const uint32_t last = MatrixPlan::rows_to(range);
          rows.append(py::make_tuple(matrix_name(kind, current.kinds(layout).size() > 2),
                                     weight_format_name(matrix.format()),
                                     request == RequestKind::kFloat32 ? "float32" : "bfloat16", kRowRanges[range],
                                     last == kNoEnd ? py::object(py::none()) : py::object(py::int_(last)),
                                     matrix.kernel(kRowRanges[range]).name, matrix.choice(range).nanoseconds));
        }
      }
    }
  }
  return rows;
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (Isa isa : supported_isas()) names.emplace_back(isa_name(isa));
  return names;
}

}  // namespace

void bind_moe(py::module_& m) {
  py::register_exception<DamagedExpert>(m, "DamagedExpert", PyExc_RuntimeError);
  m.def("isa_level", [] { return std::string(isa_name(resolve_isa("auto"))); });
  m.def("supported_isas", isa_names);
  // A kernel that tests bring along; those of the product are given by their names.
  py::class_<GemmKernel>(m, "GemmKernel").def_property_readonly("name", [](const GemmKernel& kernel) { return kernel.name; });
  py::class_<ExpertBackend, std::shared_ptr<ExpertBackend>>(m, "ExpertBackend")
      .def_property_readonly("hidden_size", &ExpertBackend::hidden_size);
  py::class_<ExpertEngine, ExpertBackend, std::shared_ptr<ExpertEngine>>(m, "ExpertEngine")
      .def(py::init(&make_engine), py::kw_only(), py::arg("hidden_size"), py::arg("intermediate_size"),
           py::arg("num_experts"), py::arg("num_layers"), py::arg("expert_begin"), py::arg("weight_format"),
           py::arg("down_format"), py::arg("activation"), py::arg("alpha"), py::arg("limit"), py::arg("has_bias"),
           py::arg("num_threads"), py::arg("cpus"), py::arg("numa_node"), py::arg("isa"), py::arg("kernel"),
           py::arg("segment_path") = "", py::arg("segment_identity") = "", py::arg("intermediate_begin") = 0,
           py::arg("held") = std::vector<std::vector<uint32_t>>{}, py::arg("slot_bytes") = uint64_t{0})
      .def("reserve", &ExpertEngine::reserve, py::arg("layer"), py::arg("count"))
      .def("load_expert", &load_expert, py::arg("layer"), py::arg("expert"), py::arg("gate"), py::arg("up"),
           py::arg("down"))
      .def("packed_expert", &packed_expert, py::arg("layer"), py::arg("expert"))
      .def("calibrate", &ExpertEngine::calibrate, py::call_guard<ReleasedGil>())
      .def("plan", &plan)
      .def("restore_plan", &ExpertEngine::restore_plan, py::arg("choices"))
      .def("fill_slots", &ExpertEngine::fill_slots, py::call_guard<ReleasedGil>())
      .def("finish_load", &ExpertEngine::finish_load, py::arg("load_record"), py::call_guard<ReleasedGil>())
      .def("verify_expert", &ExpertEngine::verify_expert, py::arg("layer"), py::arg("expert"),
           py::call_guard<ReleasedGil>())
      .def("expect_repairs", &ExpertEngine::expect_repairs, py::arg("expected"))
      .def("wait_for_damage", &wait_for_damage, py::arg("seconds"))
      .def("interrupt_damage_wait", &ExpertEngine::interrupt_damage_wait)
      .def("repair_expert", &repair_expert, py::arg("layer"), py::arg("expert"), py::arg("gate"), py::arg("up"),
           py::arg("down"))
      .def("give_up_expert", &ExpertEngine::give_up_expert, py::arg("layer"), py::arg("expert"), py::arg("reason"))
      .def("segment_error", &segment_error, py::arg("layer"), py::arg("expert"))
      .def_property_readonly("segment_found", &segment_found)
      .def_property_readonly("cold_slots", &cold_slots)
      .def_property_readonly("read_problem", [](const ExpertEngine& engine) { return engine.store().read_problem(); })
      .def("forward", &forward, py::arg("layer"), py::arg("hidden_states"), py::arg("topk_ids"),
           py::arg("topk_weights"), py::arg("output") = py::none())
      .def("stats", &stats)
      .def("start_trace", &ExpertEngine::start_trace, py::arg("most"), py::call_guard<ReleasedGil>())
      .def("stop_trace", &stop_trace)
      .def_property_readonly("weights_digest",
                             [](const ExpertEngine& engine) { return engine.store().weights_digest(); })
      .def_property_readonly("packed_bytes", [](const ExpertEngine& engine) { return engine.store().packed_bytes(); })
      .def("huge_page_bytes", [](const ExpertEngine& engine) { return engine.store().huge_page_bytes(); },
           py::call_guard<ReleasedGil>())
      .def_property_readonly("numa_bound", [](const ExpertEngine& engine) { return engine.store().numa_bound(); })
      .def_property_readonly("num_threads", &ExpertEngine::num_threads)
      .def_property_readonly("spin_microseconds",
                             [](const ExpertEngine& engine) { return engine.spin().count() / 1000; })
      .def_property_readonly("isa", [](const ExpertEngine& engine) { return std::string(isa_name(engine.isa())); });
}

}  // namespace moebius
