#include <pybind11/stl.h>

#include "kernels/bindings/bindings.h"
#include "kernels/bindings/numpy_checks.h"
#include "kernels/isa/isa.h"
#include "kernels/moe/expert_engine.h"

namespace py = pybind11;

namespace moebius {
namespace {

DType parse_weight_dtype(const std::string& name) {
  if (name == "float32") return DType::kFloat32;
  if (name == "bfloat16") return DType::kBFloat16;
  throw std::invalid_argument("weight_dtype='" + name + "' is unknown; allowed: float32, bfloat16");
}

uint32_t unsigned_option(int64_t value, const char* name) {
  if (value >= 0 && value <= INT32_MAX) return static_cast<uint32_t>(value);
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it must be 0 to 2147483647");
}

std::shared_ptr<ExpertEngine> make_engine(int64_t hidden_size, int64_t intermediate_size, int64_t num_experts,
                                          int64_t num_layers, int64_t expert_begin, const std::string& weight_dtype,
                                          const std::string& activation, int64_t num_threads,
                                          const std::vector<int>& cpus, int numa_node, const std::string& isa) {
  if (activation != "silu") throw std::invalid_argument("activation='" + activation + "' is unknown; allowed: silu");
  EngineOptions options;
  options.hidden_size = unsigned_option(hidden_size, "hidden_size");
  options.intermediate_size = unsigned_option(intermediate_size, "intermediate_size");
  options.num_experts = unsigned_option(num_experts, "num_experts");
  options.num_layers = unsigned_option(num_layers, "num_layers");
  options.expert_begin = unsigned_option(expert_begin, "expert_begin");
  options.weight_dtype = parse_weight_dtype(weight_dtype);
  options.num_threads = unsigned_option(num_threads, "num_threads");
  options.cpus = cpus;
  options.numa_node = numa_node;
  options.isa = isa;
  return std::make_shared<ExpertEngine>(options);
}

void load_expert(ExpertEngine& engine, int64_t layer, int64_t expert, const py::array& gate, const py::array& up,
                 const py::array& down) {
  const auto hidden = static_cast<py::ssize_t>(engine.options().hidden_size);
  const auto intermediate = static_cast<py::ssize_t>(engine.options().intermediate_size);
  check_shape(gate, "gate", {intermediate, hidden});
  check_shape(up, "up", {intermediate, hidden});
  check_shape(down, "down", {hidden, intermediate});
  const FloatArray gate_data(gate, "gate");
  const FloatArray up_data(up, "up");
  const FloatArray down_data(down, "down");
  if (gate_data.dtype != up_data.dtype || gate_data.dtype != down_data.dtype) {
    throw std::invalid_argument("gate, up and down have dtypes " + dtype_text(gate) + ", " + dtype_text(up) + ", " +
                                dtype_text(down) + "; they must be the same");
  }
  const ExpertWeights weights{gate_data.dtype, gate_data.array.data(), up_data.array.data(), down_data.array.data()};
  const uint32_t layer_index = unsigned_option(layer, "layer");
  const uint32_t expert_index = unsigned_option(expert, "expert");
  py::gil_scoped_release release;
  engine.load_expert(layer_index, expert_index, weights);
}

py::array_t<float> forward(ExpertEngine& engine, int64_t layer, const py::array& hidden_states,
                           const py::array& topk_ids, const py::array& topk_weights) {
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
  py::array_t<float> output({rows, hidden_states.shape(1)});
  const ExpertRequest request{unsigned_option(layer, "layer"), static_cast<uint32_t>(rows), hidden.dtype,
                              hidden.array.data(), ids.data(), weights.data(), static_cast<uint32_t>(top_k)};
  float* const target = output.mutable_data();
  py::gil_scoped_release release;
  engine.forward(request, target);
  return output;
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
  result["nonfinite_outputs"] = source.nonfinite_outputs.load();
  result["layer_calls"] = counters(source.layer_calls, {layers});
  result["layer_rows"] = counters(source.layer_rows, {layers});
  result["expert_rows"] = counters(source.expert_rows, {layers, experts});
  return result;
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (Isa isa : supported_isas()) names.emplace_back(isa_name(isa));
  return names;
}

}  // namespace

void bind_moe(py::module_& m) {
  m.def("isa_level", [] { return std::string(isa_name(resolve_isa("auto"))); });
  m.def("supported_isas", isa_names);
  py::class_<ExpertBackend, std::shared_ptr<ExpertBackend>>(m, "ExpertBackend")
      .def_property_readonly("hidden_size", &ExpertBackend::hidden_size);
  py::class_<ExpertEngine, ExpertBackend, std::shared_ptr<ExpertEngine>>(m, "ExpertEngine")
      .def(py::init(&make_engine), py::kw_only(), py::arg("hidden_size"), py::arg("intermediate_size"),
           py::arg("num_experts"), py::arg("num_layers"), py::arg("expert_begin"), py::arg("weight_dtype"),
           py::arg("activation"), py::arg("num_threads"), py::arg("cpus"), py::arg("numa_node"), py::arg("isa"))
      .def("load_expert", &load_expert, py::arg("layer"), py::arg("expert"), py::arg("gate"), py::arg("up"),
           py::arg("down"))
      .def("forward", &forward, py::arg("layer"), py::arg("hidden_states"), py::arg("topk_ids"),
           py::arg("topk_weights"))
      .def("stats", &stats)
      .def_property_readonly("packed_bytes", &ExpertEngine::packed_bytes)
      .def_property_readonly("numa_bound", &ExpertEngine::numa_bound)
      .def_property_readonly("num_threads", &ExpertEngine::num_threads)
      .def_property_readonly("isa", [](const ExpertEngine& engine) { return std::string(isa_name(engine.isa())); });
}

}  // namespace moebius
