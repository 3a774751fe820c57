"""Figures for which each alert of the chart fires, and others for which it does not."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """`POD` in a series stands for a Pod's labels; values are a sample a minute, as promtool writes them."""

    fires: dict[str, str]
    healthy: dict[str, str]
    # When it fires, and when it does not yet though the figures are there; empty: at once.
    at: str
    not_yet: str = ""
    # Of the alert, besides the namespace and severity.
    labels: dict[str, str] = field(default_factory=lambda: {"pod": "moebius-0"})
    value: str = ""  # as its text shows it
    # Whether it fires where figures are missing, so also where there are another release's only.
    of_absence: bool = False


EXPERT = {"pod": "moebius-0", "container": "expert-1"}
CASES: dict[str, Case] = {
    "MoebiusExpertServerGone": Case(
        fires={'moebius:expert_serving{POD, container="expert-1"}': "1 1 0x20"},
        healthy={'moebius:expert_serving{POD, container="expert-1"}': "1 0x3 1x20"},
        at="9m",
        not_yet="5m",
        labels=EXPERT,
    ),
    "MoebiusExpertServerUnreachable": Case(
        fires={'up{POD, container="expert-1"}': "1 1 0x20"},
        healthy={'up{POD, container="expert-1"}': "1x20", 'up{POD, container="gateway"}': "0x20"},
        at="9m",
        not_yet="5m",
        labels=EXPERT,
    ),
    "MoebiusEngineUnreachable": Case(
        fires={'up{POD, container="engine"}': "0x20"},
        healthy={'up{POD, container="engine"}': "0x3 1x20"},
        at="6m",
        not_yet="4m",
        labels={"pod": "moebius-0", "container": "engine"},
    ),
    "MoebiusGatewayUnreachable": Case(
        fires={'up{POD, container="gateway"}': "1 0x20"},
        healthy={'up{POD, container="gateway"}': "1x20", 'up{POD, container="engine"}': "0x20"},
        at="4m",
        not_yet="2m",
        labels={"pod": "moebius-0", "container": "gateway"},
    ),
    "MoebiusNoGateway": Case(
        fires={'up{POD, container="gateway"}': "1 0x20"},
        healthy={'up{POD, container="gateway"}': "1x20"},
        at="4m",
        not_yet="1m",
        labels={},
        of_absence=True,
    ),
    "MoebiusFirstTokensAreLate": Case(
        fires={
            'vllm:time_to_first_token_seconds_bucket{POD, le="40"}': "0x40",
            'vllm:time_to_first_token_seconds_bucket{POD, le="80"}': "0+60x40",
            'vllm:time_to_first_token_seconds_bucket{POD, le="+Inf"}': "0+60x40",
        },
        healthy={
            'vllm:time_to_first_token_seconds_bucket{POD, le="20"}': "0+60x40",
            'vllm:time_to_first_token_seconds_bucket{POD, le="+Inf"}': "0+60x40",
        },
        at="25m",
        not_yet="8m",
        labels={},
        value="1m 18s",
    ),
    "MoebiusTokensAreSlow": Case(
        fires={
            'vllm:inter_token_latency_seconds_bucket{POD, le="20"}': "0x40",
            'vllm:inter_token_latency_seconds_bucket{POD, le="40"}': "0+60x40",
            'vllm:inter_token_latency_seconds_bucket{POD, le="+Inf"}': "0+60x40",
        },
        healthy={
            'vllm:inter_token_latency_seconds_bucket{POD, le="0.2"}': "0+60x40",
            'vllm:inter_token_latency_seconds_bucket{POD, le="+Inf"}': "0+60x40",
        },
        at="25m",
        not_yet="8m",
        labels={},
        value="39s",
    ),
    "MoebiusCertificateExpires": Case(
        fires={
            'moebius:certificate_expiry_timestamp_seconds{POD, container="gateway", use="http"}': "600000x120"
        },
        healthy={
            'moebius:certificate_expiry_timestamp_seconds{POD, container="gateway", use="http"}': "700000x120"
        },
        at="90m",
        not_yet="50m",
        labels={"pod": "moebius-0", "container": "gateway", "use": "http"},
    ),
    "MoebiusExpertServersAreLostAgainAndAgain": Case(
        fires={"moebius:replayed_steps_total{POD}": "0+1x60"},
        healthy={"moebius:replayed_steps_total{POD}": "0+0.5x60"},
        at="45m",
        value="30",
    ),
    "MoebiusQueueGrows": Case(
        fires={"vllm:num_requests_waiting{POD}": "0+3x30"},
        healthy={"vllm:num_requests_waiting{POD}": "60-2x30"},
        at="25m",
        not_yet="8m",
        value="75",
    ),
    "MoebiusRefusesRequests": Case(
        fires={'vllm:admission_rejections_total{POD, reason="queue_full"}': "0+12x40"},
        healthy={'vllm:admission_rejections_total{POD, reason="queue_full"}': "0+3x40"},
        at="20m",
        not_yet="8m",
        labels={"reason": "queue_full"},
        value="200m",
    ),
    "MoebiusErrors": Case(
        fires={'vllm:request_errors_total{POD, status="503"}': "0+6x40"},
        healthy={'vllm:request_errors_total{POD, status="400"}': "0+60x40"},
        at="15m",
        not_yet="4m",
        labels={"status": "503"},
        value="100m",
    ),
    "MoebiusMemoryPlanMissed": Case(
        fires={"moebius:gpu_memory_late_allocations{POD}": "0 0 1x10"},
        healthy={"moebius:gpu_memory_late_allocations{POD}": "0x10"},
        at="5m",
        not_yet="1m",
    ),
    "MoebiusKvCacheFull": Case(
        fires={
            "vllm:kv_cache_usage_perc{POD}": "0.99x40",
            "vllm:num_requests_waiting{POD}": "4x40",
            "vllm:num_preemptions_total{POD}": "0+3x40",
        },
        healthy={
            "vllm:kv_cache_usage_perc{POD}": "0.99x40",
            "vllm:num_requests_waiting{POD}": "0x40",
            "vllm:num_preemptions_total{POD}": "0+3x40",
        },
        at="30m",
        not_yet="8m",
    ),
    "MoebiusCpuThrottled": Case(
        fires={
            'container_cpu_cfs_throttled_periods_total{POD, container="expert-1"}': "0+60x40",
            'container_cpu_cfs_periods_total{POD, container="expert-1"}': "0+600x40",
        },
        healthy={
            'container_cpu_cfs_throttled_periods_total{POD, container="expert-1"}': "0+3x40",
            'container_cpu_cfs_periods_total{POD, container="expert-1"}': "0+600x40",
        },
        at="30m",
        not_yet="8m",
        labels=EXPERT,
        value="10%",
    ),
    "MoebiusNumbersAreWrong": Case(
        fires={"moebius:expert_nonfinite_outputs_total{POD}": "0x10 2x20"},
        healthy={
            "moebius:expert_nonfinite_outputs_total{POD}": "2x30",
            "moebius:integrity_failures_total{POD}": "0x30",
        },
        at="14m",
        not_yet="9m",
    ),
}
