#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "kernels/bindings/bindings.h"
#include "kernels/bindings/mailbox_errors.h"
#include "kernels/bindings/released_gil.h"
#include "kernels/dense/decoder_layers.h"
#include "kernels/mailbox/mailbox_experts.h"

namespace py = pybind11;

namespace moebius {
namespace {

using namespace dense;

// A matrix and the addresses of its bias and of the order of its product's columns, 0: none.
using GivenProjection = std::tuple<std::shared_ptr<DenseMatrix>, uintptr_t, uintptr_t>;
using MaybeProjection = std::optional<GivenProjection>;
using GivenMixer = std::variant<AttentionWeights, LatentWeights, DeltaWeights, ShortConvWeights, StateSpaceWeights,
                                SelectiveScanWeights, LightningWeights>;
using GivenStream = std::tuple<float, float, float, float>;  // as NormedStream has it
// Addresses of begins and ends, or of cosines and sines with their width and whether pairs are neighbours.
using GivenSight = std::pair<uintptr_t, uintptr_t>;
using GivenRotation = std::tuple<uintptr_t, uintptr_t, uint32_t, bool>;

// Whether pages hold 8-bit floats, and the scales of keys and values there.
using GivenStorage = std::tuple<bool, float, float>;

PageStorage page_storage(const GivenStorage& given) {
  return {std::get<0>(given), std::get<1>(given), std::get<2>(given)};
}

Projection projection(const MaybeProjection& given) {
  if (!given) return {};
  const auto& [matrix, bias, order] = *given;
  return {matrix, pointer<float>(bias), pointer<int64_t>(order)};
}

void bind_mixers(py::module_& m) {
  py::class_<AttentionWeights>(m, "AttentionWeights")
      .def(py::init([](const GivenProjection& qkv, const GivenProjection& output, const MaybeProjection& gate,
                       bool gates_are_softplus, uintptr_t query_norm, uintptr_t key_norm, bool norms_are_bfloat16,
                       bool norms_are_full_width, float norm_eps, uintptr_t sinks, uintptr_t pages, uint32_t page_size,
                       uint32_t num_heads, uint32_t num_kv_heads, uint32_t head_dim, float scale,
                       std::optional<uint32_t> rotation, uint32_t sight, const GivenStorage& storage) {
             return AttentionWeights{projection(qkv), projection(output), projection(gate), gates_are_softplus,
                                     pointer<void>(query_norm), pointer<void>(key_norm), norms_are_bfloat16,
                                     norms_are_full_width, norm_eps,
                                     pointer<float>(sinks), pointer<void>(pages), page_size, num_heads, num_kv_heads,
                                     head_dim, scale, rotation, sight, page_storage(storage)};
           }),
           py::kw_only(), py::arg("qkv"), py::arg("output"), py::arg("gate"), py::arg("gates_are_softplus"),
           py::arg("query_norm"), py::arg("key_norm"), py::arg("norms_are_bfloat16"), py::arg("norms_are_full_width"),
           py::arg("norm_eps"), py::arg("sinks"), py::arg("pages"), py::arg("page_size"), py::arg("num_heads"),
           py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("scale"), py::arg("rotation"), py::arg("sight"),
           py::arg("storage"));
  py::class_<LatentWeights>(m, "LatentWeights")
      .def(py::init([](const GivenProjection& narrow, const GivenProjection& query, const GivenProjection& output,
                       const std::optional<NormWeights>& query_norm, const NormWeights& latent_norm, uintptr_t heads,
                       uintptr_t sinks, uintptr_t pages, uint32_t page_size, uint32_t num_heads, uint32_t latent_dim,
                       uint32_t nope_dim, uint32_t rope_dim, uint32_t value_dim, float scale,
                       std::optional<uint32_t> rotation, uint32_t sight, const GivenStorage& storage) {
             return LatentWeights{projection(narrow),
                                  projection(query),
                                  projection(output),
                                  query_norm.value_or(NormWeights{}),
                                  latent_norm,
                                  pointer<void>(heads),
                                  pointer<float>(sinks),
                                  pointer<void>(pages),
                                  page_size,
                                  num_heads,
                                  latent_dim,
                                  nope_dim,
                                  rope_dim,
                                  value_dim,
                                  scale,
                                  rotation,
                                  sight,
                                  page_storage(storage)};
           }),
           py::kw_only(), py::arg("narrow"), py::arg("query"), py::arg("output"), py::arg("query_norm"),
           py::arg("latent_norm"), py::arg("heads"), py::arg("sinks"), py::arg("pages"), py::arg("page_size"),
           py::arg("num_heads"), py::arg("latent_dim"), py::arg("nope_dim"), py::arg("rope_dim"), py::arg("value_dim"),
           py::arg("scale"), py::arg("rotation"), py::arg("sight"), py::arg("storage"));
  py::class_<DeltaWeights>(m, "DeltaWeights")
      .def(py::init([](const GivenProjection& input, const MaybeProjection& decays, const MaybeProjection& gates,
                       const GivenProjection& output, uint32_t b_column, uint32_t a_column, uint32_t gate_column,
                       uintptr_t taps, uintptr_t bias, uint32_t width, const DecayRule& decay, uintptr_t norm,
                       float norm_eps, bool gates_are_sigmoid, uintptr_t recent, uintptr_t states,
                       uint32_t num_key_heads, uint32_t num_value_heads, uint32_t key_dim, uint32_t value_dim) {
             return DeltaWeights{projection(input),
                                 projection(decays),
                                 projection(gates),
                                 projection(output),
                                 b_column,
                                 a_column,
                                 gate_column,
                                 pointer<float>(taps),
                                 pointer<float>(bias),
                                 width,
                                 decay,
                                 pointer<void>(norm),
                                 norm_eps,
                                 gates_are_sigmoid,
                                 pointer<void>(recent),
                                 pointer<float>(states),
                                 num_key_heads,
                                 num_value_heads,
                                 key_dim,
                                 value_dim};
           }),
           py::kw_only(), py::arg("input"), py::arg("decays"), py::arg("gates"), py::arg("output"), py::arg("b_column"),
           py::arg("a_column"), py::arg("gate_column"), py::arg("taps"), py::arg("bias"), py::arg("width"),
           py::arg("decay"), py::arg("norm"), py::arg("norm_eps"), py::arg("gates_are_sigmoid"), py::arg("recent"),
           py::arg("states"), py::arg("num_key_heads"), py::arg("num_value_heads"), py::arg("key_dim"),
           py::arg("value_dim"));
}

void bind_short_convolution(py::module_& m) {
  py::class_<ShortConvWeights>(m, "ShortConvWeights")
      .def(py::init([](const GivenProjection& input, const GivenProjection& output, uintptr_t taps, uintptr_t bias,
                       uint32_t width, uintptr_t recent, uint32_t channels) {
             return ShortConvWeights{projection(input),
                                     projection(output),
                                     pointer<float>(taps),
                                     pointer<float>(bias),
                                     width,
                                     pointer<void>(recent),
                                     channels};
           }),
           py::kw_only(), py::arg("input"), py::arg("output"), py::arg("taps"), py::arg("bias"), py::arg("width"),
           py::arg("recent"), py::arg("channels"));
}

void bind_state_space(py::module_& m) {
  py::class_<StateSpaceWeights>(m, "StateSpaceWeights")
      .def(py::init([](const GivenProjection& input, const GivenProjection& output, uintptr_t taps, uintptr_t bias,
                       uint32_t width, const StepRule& step, uintptr_t norm, float norm_eps, uintptr_t recent,
                       uintptr_t states, uint32_t num_groups, uint32_t num_heads, uint32_t state_dim,
                       uint32_t head_dim) {
             return StateSpaceWeights{projection(input),
                                      projection(output),
                                      pointer<float>(taps),
                                      pointer<float>(bias),
                                      width,
                                      step,
                                      pointer<void>(norm),
                                      norm_eps,
                                      pointer<void>(recent),
                                      pointer<float>(states),
                                      num_groups,
                                      num_heads,
                                      state_dim,
                                      head_dim};
           }),
           py::kw_only(), py::arg("input"), py::arg("output"), py::arg("taps"), py::arg("bias"), py::arg("width"),
           py::arg("step"), py::arg("norm"), py::arg("norm_eps"), py::arg("recent"), py::arg("states"),
           py::arg("num_groups"), py::arg("num_heads"), py::arg("state_dim"), py::arg("head_dim"));
}

void bind_selective_scan(py::module_& m) {
  py::class_<SelectiveScanWeights>(m, "SelectiveScanWeights")
      .def(py::init([](const GivenProjection& input, const GivenProjection& narrow, const GivenProjection& steps,
                       const GivenProjection& output, const NormWeights& step_norm, const NormWeights& write_norm,
                       const NormWeights& read_norm, uintptr_t taps, uintptr_t bias, uint32_t width, uintptr_t a_log,
                       uintptr_t skip, uintptr_t recent, uintptr_t states, uint32_t channels, uint32_t state_dim) {
             return SelectiveScanWeights{projection(input),
                                         projection(narrow),
                                         projection(steps),
                                         projection(output),
                                         step_norm,
                                         write_norm,
                                         read_norm,
                                         pointer<float>(taps),
                                         pointer<float>(bias),
                                         width,
                                         pointer<float>(a_log),
                                         pointer<float>(skip),
                                         pointer<void>(recent),
                                         pointer<float>(states),
                                         channels,
                                         state_dim};
           }),
           py::kw_only(), py::arg("input"), py::arg("narrow"), py::arg("steps"), py::arg("output"),
           py::arg("step_norm"), py::arg("write_norm"), py::arg("read_norm"), py::arg("taps"), py::arg("bias"),
           py::arg("width"), py::arg("a_log"), py::arg("skip"), py::arg("recent"), py::arg("states"),
           py::arg("channels"), py::arg("state_dim"));
}

void bind_lightning(py::module_& m) {
  py::class_<LightningWeights>(m, "LightningWeights")
      .def(py::init([](const GivenProjection& input, const GivenProjection& output, const StepRule& step,
                       const NormWeights& norm, uintptr_t states, uint32_t num_heads, uint32_t key_dim,
                       uint32_t value_dim) {
             return LightningWeights{projection(input), projection(output), step,    norm,
                                     pointer<float>(states), num_heads,     key_dim, value_dim};
           }),
           py::kw_only(), py::arg("input"), py::arg("output"), py::arg("step"), py::arg("norm"), py::arg("states"),
           py::arg("num_heads"), py::arg("key_dim"), py::arg("value_dim"));
}

std::optional<NormedStream> normed_stream(const std::optional<GivenStream>& given) {
  if (!given) return std::nullopt;
  const auto& [mixer_kept, mixer_added, ffn_kept, ffn_added] = *given;
  return NormedStream{mixer_kept, mixer_added, ffn_kept, ffn_added};
}

// Of a layer that has one, or the lack of it.
decltype(LayerWeights::mixer) layer_mixer(const std::optional<GivenMixer>& given) {
  if (!given) return NoMixer{};
  return std::visit([](const auto& mixer) { return decltype(LayerWeights::mixer){mixer}; }, *given);
}

void bind_weights(py::module_& m) {
  py::class_<NormWeights>(m, "NormWeights")
      .def(py::init([](uintptr_t weight, bool is_bfloat16, float eps) {
             return NormWeights{pointer<void>(weight), is_bfloat16, eps};
           }),
           py::arg("weight"), py::arg("is_bfloat16"), py::arg("eps"));
  bind_mixers(m);
  bind_short_convolution(m);
  bind_state_space(m);
  bind_selective_scan(m);
  bind_lightning(m);
  py::class_<MlpWeights>(m, "MlpWeights")
      .def(py::init([](const GivenProjection& gate_up, const GivenProjection& down, uintptr_t output_gate,
                       bool is_squared_relu) {
             return MlpWeights{projection(gate_up), projection(down), pointer<void>(output_gate), is_squared_relu};
           }),
           py::arg("gate_up"), py::arg("down"), py::arg("output_gate"), py::arg("is_squared_relu") = false);
  py::class_<RouterWeights>(m, "RouterWeights")
      .def(py::init([](uintptr_t weight, bool is_bfloat16, uintptr_t bias, uintptr_t correction,
                       const RoutingRule& rule, const MaybeProjection& inputs, const MaybeProjection& outputs) {
             return RouterWeights{pointer<void>(weight), pointer<float>(bias), pointer<float>(correction), is_bfloat16,
                                  rule, projection(inputs), projection(outputs)};
           }),
           py::arg("weight"), py::arg("is_bfloat16"), py::arg("bias"), py::arg("correction"), py::arg("rule"),
           py::arg("inputs") = std::nullopt, py::arg("outputs") = std::nullopt);
  py::class_<LayerWeights>(m, "LayerWeights")
      .def(py::init([](const std::optional<NormWeights>& input_norm, const std::optional<GivenMixer>& mixer,
                       const std::optional<NormWeights>& ffn_norm, const std::optional<MlpWeights>& mlp,
                       const std::optional<RouterWeights>& router, uint32_t layer, float residual_scale,
                       const std::optional<GivenStream>& stream) {
             return LayerWeights{input_norm.value_or(NormWeights{}),
                                 layer_mixer(mixer),
                                 ffn_norm.value_or(NormWeights{}),
                                 mlp.value_or(MlpWeights{}),
                                 router.value_or(RouterWeights{}),
                                 layer,
                                 residual_scale,
                                 normed_stream(stream)};
           }),
           py::arg("input_norm"), py::arg("mixer"), py::arg("ffn_norm"), py::arg("mlp"), py::arg("router"),
           py::arg("layer"), py::arg("residual_scale") = 1.0f, py::arg("normed_stream") = std::nullopt);
}

void run(DecoderLayers& layers, RoutedExperts* experts, uintptr_t residual, uintptr_t update, uint32_t num_rows,
         uintptr_t slot_mapping, uintptr_t block_table, size_t table_stride, uintptr_t requests,
         const std::vector<GivenRotation>& rotations, const std::vector<GivenSight>& sights, uintptr_t state_reads,
         uintptr_t state_writes, const std::vector<std::pair<uint32_t, uintptr_t>>& noted) {
  StepRows step{num_rows, pointer<void>(residual), pointer<void>(update), pointer<int64_t>(slot_mapping),
                pointer<int32_t>(block_table), table_stride, pointer<int32_t>(requests), {}, {},
                pointer<int64_t>(state_reads), pointer<int64_t>(state_writes), {}};
  for (const auto& [cosine, sine, rotary_dim, interleaved] : rotations) {
    step.rotations.push_back({pointer<void>(cosine), pointer<void>(sine), rotary_dim, interleaved});
  }
  for (const auto& [begins, ends] : sights) step.sights.push_back({pointer<int32_t>(begins), pointer<int32_t>(ends)});
  for (const auto& [layer, ids] : noted) step.noted.push_back({layer, pointer<int32_t>(ids)});
  const ReleasedGil release;
  layers.run(step, experts);
}

py::tuple take_times(mailbox::MailboxExperts& experts) {
  const mailbox::ExpertTimes times = experts.take_times();
  return py::make_tuple(times.layers, times.rows, times.waited, times.handed_off, times.computed);
}

}  // namespace

void bind_decoder(py::module_& m) {
  register_mailbox_errors();
  bind_weights(m);
  py::class_<RoutedExperts, std::shared_ptr<RoutedExperts>>(m, "RoutedExperts");
  py::class_<mailbox::MailboxExperts, RoutedExperts, std::shared_ptr<mailbox::MailboxExperts>>(m, "MailboxExperts")
      .def(py::init<mailbox::Mailbox&>(), py::arg("mailbox"), py::keep_alive<1, 2>())
      .def("use", &mailbox::MailboxExperts::use, py::arg("slot"), py::arg("deadline_ms"))
      .def("take_times", &take_times);
  py::class_<DecoderLayers>(m, "DecoderLayers")
      .def(py::init<std::shared_ptr<DenseThreads>, bool, uint32_t, std::vector<LayerWeights>>(), py::arg("threads"),
           py::arg("is_bfloat16"), py::arg("hidden_size"), py::arg("layers"))
      .def("run", &run, py::arg("experts"), py::arg("residual"), py::arg("update"), py::arg("num_rows"),
           py::arg("slot_mapping"), py::arg("block_table"), py::arg("table_stride"), py::arg("requests"),
           py::arg("rotations"), py::arg("sights"), py::arg("state_reads"), py::arg("state_writes"),
           py::arg("noted") = std::vector<std::pair<uint32_t, uintptr_t>>{});
}

}  // namespace moebius
