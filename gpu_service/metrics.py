"""Prometheus metrics of the engine under vLLM's names, so that existing dashboards and scalers work."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class EngineMetrics:
    """All metrics carry the labels `model_name` and `engine`; fractions are in [0, 1], times in seconds."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self._labels = {"model_name": model_name, "engine": "0"}
        self.running = self._gauge("num_requests_running", "Outputs with pages on the device")
        self.waiting = self._gauge("num_requests_waiting", "Outputs in the queue")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV pages in use by running outputs")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started outputs")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Of these, from the prefix cache")
        self.generation_tokens = self._counter("generation_tokens", "Output tokens")
        self.preemptions = self._counter("num_preemptions", "Outputs that had to give up their pages")
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens per step", _TOKENS)
        self.queue_time = self._histogram("request_queue_time_seconds", "Submitted to admitted", _SECONDS)
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "Admitted to first token", _SECONDS
        )
        self.decode_time = self._histogram("request_decode_time_seconds", "First to last token", _SECONDS)
        self.failed_steps = self._counter("failed_steps", "Steps that raised", "moebius")
        self.replayed_steps = self._counter(
            "replayed_steps", "Forward passes repeated after an expert server was lost", "moebius"
        )
        self.non_finite = self._counter(
            "nonfinite_logits", "Outputs ended because of NaN or Inf logits", "moebius"
        )
        self.integrity_failures = self._counter(
            "integrity_failures", "Integrity checks at idle that failed", "moebius"
        )

    def describe_cache(self, page_size: int, num_pages: int, prefix_caching: bool) -> None:
        """The constant gauge that tells the cache's shape in its labels."""
        values = {
            "block_size": str(page_size),
            "num_gpu_blocks": str(num_pages),
            "enable_prefix_caching": str(prefix_caching),
        }
        names = [*self._labels, *values]
        gauge = Gauge("vllm:cache_config_info", "Shape of the KV cache", names, registry=self._registry)
        gauge.labels(**self._labels, **values).set(1)

    def describe_self_test(self, worst_by_layer: Mapping[int, float]) -> None:
        """The largest relative error that the self-test at start found in each layer it looked at."""
        names = [*self._labels, "layer"]
        text = "Relative error of the worst expert tested at start"
        gauge = Gauge("moebius:expert_self_test_error", text, names, registry=self._registry)
        for layer, error in worst_by_layer.items():
            gauge.labels(**self._labels, layer=str(layer)).set(error)

    def _gauge(self, name: str, text: str) -> Gauge:
        metric = Gauge(f"vllm:{name}", text, list(self._labels), registry=self._registry)
        return metric.labels(**self._labels)

    def _counter(self, name: str, text: str, prefix: str = "vllm") -> Counter:
        metric = Counter(f"{prefix}:{name}", text, list(self._labels), registry=self._registry)
        return metric.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, list(self._labels), buckets=buckets, registry=self._registry)
        return metric.labels(**self._labels)
