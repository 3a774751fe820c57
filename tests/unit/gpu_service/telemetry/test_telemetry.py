"""Guards traces and metrics of a request: queue, prefill and decode under the request's span, once each."""

from __future__ import annotations

import pytest
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

import gpu_service.telemetry.metrics as telemetry_module
from gpu_service.telemetry.metrics import EngineMetrics, EngineTelemetry
from tests.helpers.engine_harness import make_request, prompt_of, running_engine
from tests.helpers.fake_model import VOCAB


def test_spans_of_a_traced_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three spans share the parent's trace, follow one another without a gap, and steps carry its context."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    monkeypatch.setattr(telemetry_module.trace, "get_tracer", lambda name: tracer)  # type: ignore[attr-defined]
    observer = EngineTelemetry(EngineMetrics("m", CollectorRegistry()), expert_span_ratio=0.5)
    observer.enabled = True
    traced, plain = make_request("traced", prompt_of(1, 9)), make_request("plain", prompt_of(2, 9))
    seen: list[int] = []
    with running_engine(observer=observer) as harness:

        def note_current_span(call: int) -> None:
            seen.append(trace.get_current_span().get_span_context().trace_id)

        harness.model.before_forward = note_current_span
        parent = tracer.start_span("engine.generate")
        propagate.inject(traced.trace_context, context=trace.set_span_in_context(parent))
        harness.run([traced])
        harness.run([plain])
    spans = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
    assert [span.name for span in spans] == ["engine.queue", "engine.prefill", "engine.decode"]
    context = parent.get_span_context()
    assert {span.context.trace_id for span in spans} == {context.trace_id}
    assert {span.parent.span_id for span in spans if span.parent} == {context.span_id}
    assert [span.end_time for span in spans[:2]] == [span.start_time for span in spans[1:]]
    assert seen[:12] == [context.trace_id, 0] * 6
    assert set(seen[12:]) == {0}


def test_the_cache_is_described_as_vllm_does() -> None:
    """Dashboards and autoscalers of vLLM read pages, tokens and longest requests off these labels."""
    registry = CollectorRegistry()
    EngineMetrics("m", registry).describe_cache(16, 20, True, 128)
    (family,) = [one for one in registry.collect() if one.name == "vllm:cache_config_info"]
    labels = family.samples[0].labels
    assert labels["num_gpu_blocks"] == "20"
    assert labels["kv_cache_size_tokens"] == "320"
    assert labels["kv_cache_max_concurrency"] == "2.50"


def test_counters_add_up() -> None:
    """Prompt, cached, generated and per-step tokens; nothing before the telemetry is enabled."""
    registry = CollectorRegistry()
    observer = EngineTelemetry(EngineMetrics("m", registry))
    labels = {"model_name": "m", "engine": "0"}
    with running_engine(observer=observer, overlap=True) as harness:
        harness.run([make_request("warm-up", prompt_of(5, 9))])
        assert registry.get_sample_value("vllm:generation_tokens_total", labels) == 0
        observer.enabled = True
        harness.run([make_request("a", prompt_of(1, 30))])
        harness.run([make_request("b", prompt_of(1, 30))])
        harness.model.poison_token = VOCAB - 1
        harness.run([make_request("bad", [VOCAB - 1])])
    value = registry.get_sample_value
    assert value("vllm:prompt_tokens_total", labels) == 60
    assert value("vllm:prompt_tokens_cached_total", labels) == 28
    assert value("vllm:prefix_cache_queries_total", labels) == 61
    assert value("vllm:prefix_cache_hits_total", labels) == 28
    assert value("vllm:generation_tokens_total", labels) == 24
    assert value("vllm:request_prefill_time_seconds_count", labels) == 2
    assert value("vllm:request_num_preemptions_count", labels) == 3
    assert value("vllm:request_num_preemptions_sum", labels) == 0
    assert value("vllm:iteration_tokens_total_count", labels) is not None
    # As vLLM counts: of prompts what is computed, and each token of outputs; two steps knew not yet of NaN.
    assert value("vllm:iteration_tokens_total_sum", labels) == 61 - 28 + 24 + 2
    assert value("moebius:nonfinite_logits_total", labels) == 1
