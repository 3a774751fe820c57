"""Guards telemetry of the whole system: one trace id from the HTTP span to the expert servers, in a collector
and in the log lines of all processes; one scrape that holds what all of them count, and adds up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.demo import demo_checkpoint
from tests.helpers.otlp_collector import Collector, running_collector
from tests.helpers.stack import Stack, running_stack
from tests.helpers.waiting import wait_until

pytestmark = pytest.mark.demo
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SERVICES = {"moebius-gateway", "moebius-gpu", "moebius-expert"}
HEADERS = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
TOP_K = 4
# What dashboards, scalers and endpoint pickers made for vLLM ask for, and we can say truthfully.
VLLM_NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
    "num_preemptions",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "iteration_tokens_total",
    "cache_config_info",
    "admission_rejections",
}
Figures = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """What receives traces and metrics."""
    with running_collector() as running:
        yield running


@pytest.fixture(scope="module")
def stack(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two expert servers, every step traced, logs as JSON."""
    flags = ["--expert-servers", "2", "--served-model-name", "m", "--expert-span-ratio", "1"]
    flags += ["--otlp-endpoint", collector.endpoint, "--otlp-metrics-interval-s", "1"]
    flags += ["--log-format", "json", "--log-level", "debug", "--experts-per-token", str(TOP_K)]
    with running_stack(demo_checkpoint(), tmp_path_factory.mktemp("stack"), *flags) as running:
        yield running


def names_by_service(collector: Collector) -> dict[str, set[str]]:
    """Returns the names of the spans of our trace that each service sent."""
    found: dict[str, set[str]] = {}
    for service, span in collector.spans_by_service():
        if span.trace_id.hex() == TRACE_ID:
            found.setdefault(service, set()).add(span.name)
    return found


def attributes_of(span: Any) -> dict[str, Any]:
    """By name; of each value whichever kind it has."""
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def scraped(stack: Stack) -> Figures:
    """All samples of one scrape, read by Prometheus' own parser; no family is declared twice."""
    text = httpx.get(f"{stack.metrics_url}/metrics", timeout=60).text
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), sorted(names)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def total(figures: Figures, name: str, **labels: str) -> float:
    """Returns the sum of a sample over all labels but those given."""
    return sum(
        value for (sample, found), value in figures.items() if sample == name and labels.items() <= set(found)
    )


def stream(stack: Stack, max_tokens: int) -> dict[str, int]:
    """Returns a streamed completion of our trace; its usage."""
    body = {"model": "m", "prompt": "One, two,", "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    url = f"{stack.base_url}/v1/completions"
    with httpx.stream("POST", url, json=body, headers=HEADERS, timeout=60) as answer:
        assert answer.status_code == 200
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    usage: dict[str, int] = json.loads(events[-1])["usage"]
    return usage


def test_one_trace_crosses_all_processes(stack: Stack, collector: Collector) -> None:
    """A caller's `traceparent` is followed by the gateway, the engine and both expert servers; the spans of
    gateway and engine say what was asked and answered in the words of OpenTelemetry's conventions."""
    usage = stream(stack, 4)
    wait_until(lambda: names_by_service(collector).keys() >= SERVICES)
    names = names_by_service(collector)
    wait_until(lambda: "text_completion m" in names_by_service(collector)["moebius-gateway"])
    spans = [span for span in collector.spans if span.trace_id.hex() == TRACE_ID]
    known = {span.span_id for span in spans} | {bytes.fromhex("b7ad6b7169203331")}
    assert [span.name for span in spans if span.parent_span_id not in known] == []
    assert any("prefill" in name for name in names["moebius-gpu"]), names
    assert any("decode" in name for name in names["moebius-gpu"]), names
    (served,) = [span for span in spans if span.name == "text_completion m"]
    said = attributes_of(served)
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "m"
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.request.stream"] is True
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    (engine,) = [span for span in spans if span.name == "engine.generate"]
    assert attributes_of(engine)["gen_ai.usage.output_tokens"] == usage["completion_tokens"]

    def servers() -> set[Any]:
        ours = [span for span in collector.spans if span.trace_id.hex() == TRACE_ID]
        return {attributes_of(span).get("moebius.expert.server") for span in ours}

    wait_until(lambda: servers() >= {0, 1})


def test_log_lines_of_all_processes_carry_the_trace(stack: Stack) -> None:
    """Whatever is logged, by processes or their supervisor, is a JSON object; those of a request, in the
    gateway, the engine and the expert servers, have its trace id."""
    stream(stack, 2)

    def processes() -> set[str]:
        lines = [json.loads(line) for line in stack.log.read_text().splitlines() if line.strip()]
        return {line["process"] for line in lines if line.get("trace_id") == TRACE_ID}

    wait_until(lambda: processes() >= {"gateway", "gpu", "expert-0", "expert-1"})
    lines = [json.loads(line) for line in stack.log.read_text().splitlines() if line.strip()]
    assert {line["event"] for line in lines if line["process"] == "supervisor"} >= {"process state", "ready"}


def test_one_scrape_has_everything_and_adds_up(stack: Stack) -> None:
    """The gateway's page has vLLM's names and ours, of all processes. Tokens served are tokens counted, and
    the experts that servers computed are those that tokens were routed to."""
    before = scraped(stack)
    now = before
    usages = [stream(stack, 5), stream(stack, 9)]
    body = {"model": "m", "prompt": "Three,", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    whole = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=60).json()["usage"]
    usages.append(whole)
    served = sum(usage["completion_tokens"] for usage in usages)
    asked = sum(usage["prompt_tokens"] for usage in usages)

    def change(name: str, **labels: str) -> float:
        return total(now, name, **labels) - total(before, name, **labels)

    def settled() -> bool:
        """An engine that schedules ahead computes a step more, and its counters follow its last word."""
        nonlocal now
        last, now = now, scraped(stack)
        rows = "moebius:expert_rows_total"
        return total(last, rows) == total(now, rows) and change("vllm:generation_tokens_total") >= served

    wait_until(settled)
    families = {name.removeprefix("vllm:") for name, _ in now if name.startswith("vllm:")}
    suffixes = ("", "_total", "_bucket")
    assert {name for name in VLLM_NAMES if not any(name + end in families for end in suffixes)} == set()
    assert change("vllm:generation_tokens_total") == served
    assert change("vllm:request_generation_tokens_sum") == served
    assert change("vllm:prompt_tokens_total") == change("vllm:request_prompt_tokens_sum") == asked
    assert change("vllm:time_to_first_token_seconds_count") == 3  # the answer as a whole has one, too
    assert change("vllm:e2e_request_latency_seconds_count") == 3
    rows = [change("moebius:expert_rows_total", server=str(server)) for server in range(2)]
    routed = [change("moebius:expert_computed_rows_total", server=str(server)) for server in range(2)]
    assert rows[0] == rows[1] > 0
    assert routed == [TOP_K * count for count in rows]


def test_metrics_of_all_processes_are_sent(stack: Stack, collector: Collector) -> None:
    """Over OTLP gateway, engine and expert servers send what they count, the gateway by the names of the
    conventions for generative AI as well."""
    stream(stack, 2)
    names = {
        "gen_ai.server.request.duration",
        "gen_ai.server.time_to_first_token",
        "gen_ai.server.time_per_output_token",
        "gen_ai.client.token.usage",
        "vllm.generation_tokens",
        "moebius.expert_rows",
    }
    wait_until(lambda: names <= {metric.name for metric in collector.metrics})
    assert collector.metric_services >= SERVICES
