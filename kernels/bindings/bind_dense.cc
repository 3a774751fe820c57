#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/bindings/bindings.h"
#include "kernels/bindings/released_gil.h"
#include "kernels/bindings/source_arrays.h"
#include "kernels/dense/dense_matrix.h"
#include "kernels/dense/latent_attention.h"
#include "kernels/dense/prompt_attention.h"
#include "kernels/dense/recurrent.h"
#include "kernels/dense/row_ops.h"

namespace py = pybind11;

namespace moebius {
namespace {

using dense::DecayRule;
using dense::DenseMatrix;
using dense::DenseThreads;
using dense::RoutingRule;
using dense::StepRule;

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

DType float_type(bool is_bfloat16) { return is_bfloat16 ? DType::kBFloat16 : DType::kFloat32; }

std::shared_ptr<DenseMatrix> make_matrix(const std::shared_ptr<DenseThreads>& threads, uint32_t in_features,
                                         const std::vector<std::pair<std::string, uint32_t>>& parts,
                                         uintptr_t memory, size_t memory_bytes) {
  std::vector<dense::PartShape> shapes;
  for (const auto& [format, rows] : parts) shapes.push_back({parse_weight_format(format), rows});
  return std::make_shared<DenseMatrix>(threads, in_features, shapes, pointer<std::byte>(memory), memory_bytes);
}

void pack(DenseMatrix& matrix, uint32_t part, uint32_t first_row, const py::object& source) {
  const SourceArrays arrays = read_source(source, "source");
  const ReleasedGil release;
  matrix.pack(part, first_row, arrays.matrix);
}

void multiply(DenseMatrix& matrix, uintptr_t rows, size_t row_stride, uint32_t num_rows, bool rows_are_bfloat16,
              uintptr_t output, size_t output_stride, bool output_is_bfloat16, uintptr_t bias) {
  const ReleasedGil release;
  matrix.multiply({pointer<void>(rows), row_stride, num_rows, float_type(rows_are_bfloat16), pointer<void>(output),
                   output_stride, float_type(output_is_bfloat16), pointer<float>(bias)});
}

void take_rows(DenseMatrix& matrix, uintptr_t ids, uint32_t count, uintptr_t target, bool target_is_bfloat16) {
  const ReleasedGil release;
  matrix.take_rows(pointer<int64_t>(ids), count, pointer<void>(target), float_type(target_is_bfloat16));
}

void add_norm(DenseThreads& threads, uintptr_t residual, bool is_bfloat16, uintptr_t update, bool update_is_bfloat16,
              uintptr_t weight, bool weight_is_bfloat16, uintptr_t output, float eps, uint32_t size,
              uint32_t num_rows) {
  const ReleasedGil release;
  dense::add_norm(threads, {is_bfloat16, update_is_bfloat16, weight_is_bfloat16, pointer<void>(residual),
                            pointer<void>(update), pointer<void>(weight), pointer<void>(output), eps, size}, num_rows);
}

void gate(DenseThreads& threads, bool is_bfloat16, uintptr_t gate_up, uintptr_t output, uint32_t size,
          uint32_t num_rows) {
  const ReleasedGil release;
  dense::gate(threads, {is_bfloat16, false, pointer<void>(gate_up), pointer<void>(output), size}, num_rows);
}

void silu(DenseThreads& threads, bool is_bfloat16, uintptr_t values, size_t stride, uintptr_t output, uint32_t size,
          uint32_t num_rows) {
  const ReleasedGil release;
  dense::silu(threads, {is_bfloat16, pointer<void>(values), pointer<void>(output), size}, stride, num_rows);
}

void rotate_and_append(DenseThreads& threads, bool is_bfloat16, uintptr_t heads, size_t heads_stride,
                       uint32_t num_heads, uint32_t num_query_heads, uint32_t head_dim, uintptr_t query_weight,
                       uintptr_t key_weight, bool weights_are_bfloat16, float eps, uintptr_t cosine, uintptr_t sine,
                       uint32_t rotary_dim, bool interleaved, uintptr_t values, size_t values_stride, uintptr_t slots,
                       uintptr_t slot_mapping, uint32_t num_rows, bool is_float8, float key_scale, float value_scale) {
  const ReleasedGil release;
  const dense::RotateWork first{is_bfloat16,
                                weights_are_bfloat16,
                                pointer<void>(heads),
                                pointer<void>(query_weight),
                                pointer<void>(key_weight),
                                pointer<void>(cosine),
                                pointer<void>(sine),
                                nullptr,
                                eps,
                                num_heads,
                                num_query_heads,
                                head_dim,
                                head_dim,
                                rotary_dim,
                                interleaved};
  dense::rotate_and_append(threads, {first, heads_stride, num_rows, pointer<void>(values), values_stride,
                                     pointer<void>(slots), pointer<int64_t>(slot_mapping),
                                     {is_float8, key_scale, value_scale}});
}

void rotate(DenseThreads& threads, bool is_bfloat16, uintptr_t heads, size_t heads_stride, uint32_t num_heads,
            uint32_t head_dim, uint32_t head_stride, uintptr_t cosine, uintptr_t sine, uint32_t rotary_dim,
            bool interleaved, uint32_t num_rows) {
  const ReleasedGil release;
  const dense::RotateWork first{is_bfloat16,
                                false,
                                pointer<void>(heads),
                                nullptr,
                                nullptr,
                                pointer<void>(cosine),
                                pointer<void>(sine),
                                nullptr,
                                0.0f,
                                num_heads,
                                num_heads,
                                head_dim,
                                head_stride,
                                rotary_dim,
                                interleaved};
  dense::rotate(threads, first, heads_stride, num_rows);
}

void attend(DenseThreads& threads, bool is_bfloat16, uintptr_t query, size_t query_stride, uintptr_t pages,
            uint32_t page_size, uintptr_t block_table, size_t table_stride, uintptr_t requests, uintptr_t begins,
            uintptr_t ends, uintptr_t sinks, uintptr_t output, float scale, uint32_t num_rows, uint32_t num_heads,
            uint32_t num_kv_heads, uint32_t head_dim, bool is_prompt, bool is_float8, float key_scale,
            float value_scale) {
  const ReleasedGil release;
  const auto run = is_prompt ? &dense::attend_prompt : &dense::attend;
  run(threads, {is_bfloat16, pointer<void>(query), query_stride, pointer<void>(pages),
                pointer<int32_t>(block_table), table_stride, pointer<int32_t>(requests),
                pointer<int32_t>(begins), pointer<int32_t>(ends), pointer<float>(sinks),
                pointer<void>(output), scale, num_rows, num_heads, num_kv_heads, head_dim, page_size,
                {is_float8, key_scale, value_scale}});
}

void multiply_heads(DenseThreads& threads, bool is_bfloat16, uintptr_t rows, size_t row_stride, size_t head_stride,
                    uintptr_t matrices, size_t matrix_stride, uintptr_t output, uint32_t num_rows, uint32_t num_heads,
                    uint32_t matrix_rows, uint32_t latent_dim, bool is_transposed) {
  const ReleasedGil release;
  const auto run = is_transposed ? &dense::project_values : &dense::absorb_queries;
  run(threads, {is_bfloat16, pointer<void>(rows), row_stride, head_stride, pointer<void>(matrices), matrix_stride,
                pointer<void>(output), num_rows, num_heads, matrix_rows, latent_dim});
}

void attend_latents(DenseThreads& threads, bool is_bfloat16, uintptr_t query, uintptr_t query_rope,
                    size_t rope_row_stride, size_t rope_head_stride, uintptr_t pages, uint32_t page_size,
                    uintptr_t block_table, size_t table_stride, uintptr_t requests, uintptr_t ends, uintptr_t sinks,
                    uintptr_t output, float scale, uint32_t num_rows, uint32_t num_heads, uint32_t latent_dim,
                    uint32_t rope_dim, bool is_float8, float page_scale) {
  const ReleasedGil release;
  dense::attend_latents(threads, {is_bfloat16, pointer<void>(query), pointer<void>(query_rope), rope_row_stride,
                                  rope_head_stride, pointer<void>(pages), pointer<int32_t>(block_table), table_stride,
                                  pointer<int32_t>(requests), pointer<int32_t>(ends), pointer<float>(sinks),
                                  pointer<void>(output), scale, num_rows, num_heads, latent_dim, rope_dim, page_size,
                                  {is_float8, page_scale, page_scale}});
}

void bind_latents(py::class_<DenseThreads, std::shared_ptr<DenseThreads>>& threads) {
  threads
      .def("multiply_heads", &multiply_heads, py::arg("is_bfloat16"), py::arg("rows"), py::arg("row_stride"),
           py::arg("head_stride"), py::arg("matrices"), py::arg("matrix_stride"), py::arg("output"),
           py::arg("num_rows"), py::arg("num_heads"), py::arg("matrix_rows"), py::arg("latent_dim"),
           py::arg("is_transposed"))
      .def("attend_latents", &attend_latents, py::arg("is_bfloat16"), py::arg("query"), py::arg("query_rope"),
           py::arg("rope_row_stride"), py::arg("rope_head_stride"), py::arg("pages"), py::arg("page_size"),
           py::arg("block_table"), py::arg("table_stride"), py::arg("requests"), py::arg("ends"), py::arg("sinks"),
           py::arg("output"), py::arg("scale"), py::arg("num_rows"), py::arg("num_heads"), py::arg("latent_dim"),
           py::arg("rope_dim"), py::arg("is_float8") = false, py::arg("page_scale") = 1.0f);
}

void route(DenseThreads& threads, uintptr_t logits, uintptr_t correction, uintptr_t valid, uintptr_t weights,
           uintptr_t ids, uint32_t num_rows, const RoutingRule& rule) {
  const ReleasedGil release;
  dense::route(threads, {rule, pointer<float>(logits), pointer<float>(correction), pointer<bool>(valid),
                         pointer<float>(weights), pointer<int32_t>(ids), num_rows});
}

void score_experts(DenseThreads& threads, uintptr_t hidden_states, bool is_bfloat16, uint32_t num_rows,
                   uint32_t hidden_size, uintptr_t weight, bool weight_is_bfloat16, uintptr_t bias, uintptr_t logits,
                   uint32_t num_experts) {
  const ReleasedGil release;
  dense::score_experts(threads, {pointer<void>(hidden_states), is_bfloat16, num_rows, hidden_size,
                                 pointer<void>(weight), weight_is_bfloat16, pointer<float>(bias), num_experts,
                                 pointer<float>(logits)});
}

void convolve(DenseThreads& threads, bool is_bfloat16, bool activates, uintptr_t rows, size_t row_stride,
              uint32_t num_rows, uint32_t channels, uint32_t width, uintptr_t states, uintptr_t reads,
              uintptr_t writes, uintptr_t taps, uintptr_t bias, uintptr_t output) {
  const ReleasedGil release;
  dense::convolve(threads, {is_bfloat16, activates, pointer<void>(rows), nullptr, nullptr, row_stride, num_rows,
                            channels, width, pointer<void>(states), pointer<int64_t>(reads), pointer<int64_t>(writes),
                            pointer<float>(taps), pointer<float>(bias), pointer<void>(output)});
}

void update_delta(DenseThreads& threads, bool is_bfloat16, uintptr_t qkv, size_t qkv_stride, uintptr_t a,
                  size_t a_stride, uintptr_t b, size_t b_stride, const DecayRule& decay, uintptr_t states,
                  uintptr_t reads, uintptr_t writes, uintptr_t output, uint32_t num_rows, uint32_t num_key_heads,
                  uint32_t num_value_heads, uint32_t key_dim, uint32_t value_dim) {
  const ReleasedGil release;
  dense::update_delta(
      threads, {is_bfloat16, pointer<void>(qkv), qkv_stride, pointer<void>(a), a_stride, pointer<void>(b), b_stride,
                decay, pointer<float>(states), pointer<int64_t>(reads), pointer<int64_t>(writes), pointer<void>(output),
                num_rows, num_key_heads, num_value_heads, key_dim, value_dim});
}

void update_state_space(DenseThreads& threads, bool is_bfloat16, uintptr_t xbc, size_t xbc_stride, uintptr_t dt,
                        size_t dt_stride, const StepRule& step, uintptr_t states, uintptr_t reads, uintptr_t writes,
                        uintptr_t output, uint32_t num_rows, uint32_t num_groups, uint32_t num_heads,
                        uint32_t state_dim, uint32_t head_dim) {
  const ReleasedGil release;
  dense::update_state_space(threads, {is_bfloat16, pointer<void>(xbc), xbc_stride, pointer<void>(dt), dt_stride, step,
                                      pointer<float>(states), pointer<int64_t>(reads), pointer<int64_t>(writes),
                                      pointer<float>(output), num_rows, num_groups, num_heads, state_dim, head_dim});
}

// Addresses of columns of rows, with the elements between two rows.
using GivenColumns = std::pair<uintptr_t, size_t>;

void scan(DenseThreads& threads, bool is_bfloat16, const GivenColumns& values, const GivenColumns& steps,
          const GivenColumns& write, const GivenColumns& read, const GivenColumns& gates, uintptr_t a_log,
          uintptr_t skip, uintptr_t states, uintptr_t reads, uintptr_t writes, uintptr_t output, uint32_t num_rows,
          uint32_t channels, uint32_t state_dim) {
  const ReleasedGil release;
  const auto columns = [](const GivenColumns& given) {
    return dense::RowColumns{pointer<void>(given.first), given.second};
  };
  dense::scan(threads, {is_bfloat16, columns(values), columns(steps), columns(write), columns(read), columns(gates),
                        pointer<float>(a_log), pointer<float>(skip), pointer<float>(states), pointer<int64_t>(reads),
                        pointer<int64_t>(writes), pointer<void>(output), num_rows, channels, state_dim});
}

void gated_group_norm(DenseThreads& threads, bool is_bfloat16, uintptr_t values, uintptr_t gates, size_t gates_stride,
                      uintptr_t weight, uintptr_t output, float eps, uint32_t size, uint32_t num_groups,
                      uint32_t num_rows) {
  const ReleasedGil release;
  const dense::GatedGroupNormWork first{is_bfloat16,
                                        pointer<float>(values),
                                        pointer<void>(gates),
                                        pointer<void>(weight),
                                        nullptr,
                                        pointer<void>(output),
                                        eps,
                                        size};
  dense::gated_group_norm(threads, {first, num_rows, num_groups, gates_stride});
}

void gated_norm(DenseThreads& threads, bool is_bfloat16, bool is_sigmoid, uintptr_t values, uintptr_t gates,
                size_t gates_stride, uintptr_t weight, uintptr_t output, float eps, uint32_t size, uint32_t num_heads,
                uint32_t num_rows) {
  const ReleasedGil release;
  const dense::GatedNormWork first{is_bfloat16, is_sigmoid, pointer<void>(values), pointer<void>(gates),
                                   pointer<void>(weight), pointer<void>(output), eps, size};
  dense::gated_norm(threads, {first, num_rows, num_heads, gates_stride});
}

void apply_gate(DenseThreads& threads, bool is_bfloat16, bool is_softplus, uintptr_t values, uintptr_t gates,
                size_t gates_stride, uintptr_t output, uint32_t size, uint32_t num_gates, uint32_t num_rows) {
  const ReleasedGil release;
  dense::apply_gate(threads, {is_bfloat16, is_softplus, pointer<void>(values), pointer<void>(gates),
                              pointer<void>(output), size, num_gates}, gates_stride, num_rows);
}

void bind_recurrent(py::class_<DenseThreads, std::shared_ptr<DenseThreads>>& threads) {
  threads
      .def("convolve", &convolve, py::arg("is_bfloat16"), py::arg("activates"), py::arg("rows"), py::arg("row_stride"),
           py::arg("num_rows"), py::arg("channels"), py::arg("width"), py::arg("states"), py::arg("reads"),
           py::arg("writes"), py::arg("taps"), py::arg("bias"), py::arg("output"))
      .def("update_delta", &update_delta, py::arg("is_bfloat16"), py::arg("qkv"), py::arg("qkv_stride"), py::arg("a"),
           py::arg("a_stride"), py::arg("b"), py::arg("b_stride"), py::arg("decay"), py::arg("states"),
           py::arg("reads"), py::arg("writes"), py::arg("output"), py::arg("num_rows"), py::arg("num_key_heads"),
           py::arg("num_value_heads"), py::arg("key_dim"), py::arg("value_dim"))
      .def("update_state_space", &update_state_space, py::arg("is_bfloat16"), py::arg("xbc"), py::arg("xbc_stride"),
           py::arg("dt"), py::arg("dt_stride"), py::arg("step"), py::arg("states"), py::arg("reads"), py::arg("writes"),
           py::arg("output"), py::arg("num_rows"), py::arg("num_groups"), py::arg("num_heads"), py::arg("state_dim"),
           py::arg("head_dim"))
      .def("scan", &scan, py::arg("is_bfloat16"), py::arg("values"), py::arg("steps"), py::arg("write"),
           py::arg("read"), py::arg("gates"), py::arg("a_log"), py::arg("skip"), py::arg("states"), py::arg("reads"),
           py::arg("writes"), py::arg("output"), py::arg("num_rows"), py::arg("channels"), py::arg("state_dim"))
      .def("gated_group_norm", &gated_group_norm, py::arg("is_bfloat16"), py::arg("values"), py::arg("gates"),
           py::arg("gates_stride"), py::arg("weight"), py::arg("output"), py::arg("eps"), py::arg("size"),
           py::arg("num_groups"), py::arg("num_rows"))
      .def("gated_norm", &gated_norm, py::arg("is_bfloat16"), py::arg("is_sigmoid"), py::arg("values"),
           py::arg("gates"), py::arg("gates_stride"), py::arg("weight"), py::arg("output"), py::arg("eps"),
           py::arg("size"), py::arg("num_heads"), py::arg("num_rows"))
      .def("apply_gate", &apply_gate, py::arg("is_bfloat16"), py::arg("is_softplus"), py::arg("values"),
           py::arg("gates"), py::arg("gates_stride"), py::arg("output"), py::arg("size"), py::arg("num_gates"),
           py::arg("num_rows"));
}

void bind_routing(py::module_& m) {
  py::class_<RoutingRule>(m, "RoutingRule")
      .def(py::init([](uint32_t num_experts, uint32_t top_k, uint32_t num_groups, uint32_t top_groups,
                       bool group_by_maximum, uint32_t score, uint32_t post, float softcap, float epsilon,
                       float scale) {
             return RoutingRule{num_experts, top_k, num_groups, top_groups, group_by_maximum,
                                static_cast<dense::Score>(score), static_cast<dense::Post>(post), softcap, epsilon,
                                scale};
           }),
           py::arg("num_experts"), py::arg("top_k"), py::arg("num_groups"), py::arg("top_groups"),
           py::arg("group_by_maximum"), py::arg("score"), py::arg("post"), py::arg("softcap"), py::arg("epsilon"),
           py::arg("scale"));
}

}  // namespace

void bind_dense(py::module_& m) {
  bind_routing(m);
  py::class_<DenseThreads, std::shared_ptr<DenseThreads>> threads(m, "DenseThreads");
  py::class_<DecayRule>(m, "DecayRule")
      .def(py::init([](uintptr_t a_log, uintptr_t dt_bias, bool is_by_element, std::optional<float> bound) {
             return DecayRule{is_by_element, bound.value_or(0.0f), pointer<float>(a_log), pointer<float>(dt_bias)};
           }),
           py::arg("a_log"), py::arg("dt_bias"), py::arg("is_by_element") = false, py::arg("bound") = std::nullopt);
  py::class_<StepRule>(m, "StepRule")
      .def(py::init([](uintptr_t a_log, uintptr_t dt_bias, uintptr_t skip) {
             return StepRule{pointer<float>(a_log), pointer<float>(dt_bias), pointer<float>(skip)};
           }),
           py::arg("a_log"), py::arg("dt_bias"), py::arg("skip"));
  bind_recurrent(threads);
  bind_latents(threads);
  threads
      .def(py::init([](uint32_t num_threads, const std::string& isa) {
             return std::make_shared<DenseThreads>(num_threads, isa);
           }),
           py::arg("num_threads"), py::arg("isa") = "auto")
      .def("add_norm", &add_norm, py::arg("residual"), py::arg("is_bfloat16"), py::arg("update"),
           py::arg("update_is_bfloat16"), py::arg("weight"), py::arg("weight_is_bfloat16"), py::arg("output"),
           py::arg("eps"), py::arg("size"), py::arg("num_rows"))
      .def("gate", &gate, py::arg("is_bfloat16"), py::arg("gate_up"), py::arg("output"), py::arg("size"),
           py::arg("num_rows"))
      .def("silu", &silu, py::arg("is_bfloat16"), py::arg("values"), py::arg("stride"), py::arg("output"),
           py::arg("size"), py::arg("num_rows"))
      .def("rotate_and_append", &rotate_and_append, py::arg("is_bfloat16"), py::arg("heads"), py::arg("heads_stride"),
           py::arg("num_heads"), py::arg("num_query_heads"), py::arg("head_dim"), py::arg("query_weight"),
           py::arg("key_weight"), py::arg("weights_are_bfloat16"), py::arg("eps"), py::arg("cosine"), py::arg("sine"),
           py::arg("rotary_dim"), py::arg("interleaved"), py::arg("values"), py::arg("values_stride"), py::arg("slots"),
           py::arg("slot_mapping"), py::arg("num_rows"), py::arg("is_float8") = false, py::arg("key_scale") = 1.0f,
           py::arg("value_scale") = 1.0f)
      .def("rotate", &rotate, py::arg("is_bfloat16"), py::arg("heads"), py::arg("heads_stride"), py::arg("num_heads"),
           py::arg("head_dim"), py::arg("head_stride"), py::arg("cosine"), py::arg("sine"), py::arg("rotary_dim"),
           py::arg("interleaved"), py::arg("num_rows"))
      .def("attend", &attend, py::arg("is_bfloat16"), py::arg("query"), py::arg("query_stride"), py::arg("pages"),
           py::arg("page_size"), py::arg("block_table"), py::arg("table_stride"), py::arg("requests"),
           py::arg("begins"), py::arg("ends"), py::arg("sinks"), py::arg("output"), py::arg("scale"),
           py::arg("num_rows"), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"),
           py::arg("is_prompt") = false, py::arg("is_float8") = false, py::arg("key_scale") = 1.0f,
           py::arg("value_scale") = 1.0f)
      .def("route", &route, py::arg("logits"), py::arg("correction"), py::arg("valid"), py::arg("weights"),
           py::arg("ids"), py::arg("num_rows"), py::arg("rule"))
      .def("score_experts", &score_experts, py::arg("hidden_states"), py::arg("is_bfloat16"), py::arg("num_rows"),
           py::arg("hidden_size"), py::arg("weight"), py::arg("weight_is_bfloat16"), py::arg("bias"), py::arg("logits"),
           py::arg("num_experts"))
      .def_property_readonly("num_threads", [](DenseThreads& threads) { return threads.pool().size(); })
      .def_property_readonly("isa", [](const DenseThreads& threads) { return std::string(isa_name(threads.isa())); });
  py::class_<DenseMatrix, std::shared_ptr<DenseMatrix>>(m, "DenseMatrix")
      .def(py::init(&make_matrix), py::arg("threads"), py::arg("in_features"), py::arg("parts"), py::arg("memory"),
           py::arg("memory_bytes"))
      .def("pack", &pack, py::arg("part"), py::arg("first_row"), py::arg("source"))
      .def("calibrate", &DenseMatrix::calibrate, py::call_guard<ReleasedGil>())
      .def("multiply", &multiply, py::arg("rows"), py::arg("row_stride"), py::arg("num_rows"),
           py::arg("rows_are_bfloat16"), py::arg("output"), py::arg("output_stride"), py::arg("output_is_bfloat16"),
           py::arg("bias") = 0)
      .def("take_rows", &take_rows, py::arg("ids"), py::arg("count"), py::arg("target"),
           py::arg("target_is_bfloat16"))
      .def_property_readonly("in_features", &DenseMatrix::in_features)
      .def_property_readonly("out_features", &DenseMatrix::out_features);
}

}  // namespace moebius
