"""Guards the number of engines: what is busy is kept, what is not is given up, by KEDA's rule and PromQL."""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.chart import Manifest, render

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
from tests.k8s.test_chart import MODEL, OPTIONS, merged
from tests.k8s.test_monitoring import promtool

MAX_NUM_SEQS = 16


@dataclass(frozen=True)
class Case:
    """Figures of two engines, and what follows."""

    running: tuple[int, int]
    waiting: tuple[int, int]
    kv_usage: tuple[float, float]
    # Of the queries in their order, and engines that an autoscaler asks for.
    values: tuple[float, float, float]
    replicas: int


LITTLE, MUCH = 0.0625, 0.9375
CASES = {
    "full steps, empty queues": Case((16, 16), (0, 0), (0.5, 0.5), (0.0, 2.0, 1.0), 3),
    "one is full, the other has nothing": Case((16, 0), (0, 0), (0.5, 0.0), (0.0, 1.0, 0.5), 2),
    "as much as is wanted": Case((12, 13), (0, 0), (0.5, 0.5), (0.0, 1.5625, 1.0), 2),
    "little, which one engine computes": Case((6, 6), (0, 0), (LITTLE, LITTLE), (0.0, 0.75, 0.125), 1),
    "nothing": Case((0, 0), (0, 0), (0.0, 0.0), (0.0, 0.0, 0.0), 0),
    "long queues": Case((16, 16), (9, 7), (0.5, 0.5), (16.0, 2.0, 1.0), 4),
    "few long prompts fill the KV caches": Case((2, 2), (0, 0), (MUCH, MUCH), (0.0, 0.25, 1.875), 3),
}


def scaler(nodes: int = 1) -> dict[str, Any]:
    """Returns the engines' ScaledObject."""
    manifests = render(merged({"model": MODEL}, OPTIONS, {"engine": {"nodes": nodes}}))
    found = [one for one in manifests if one["kind"] == "ScaledObject"]
    return next(one for one in found if "gateway" not in one["metadata"]["name"])


def test_a_scaler_scales_what_there_is() -> None:
    """The workload that it names is rendered, and its queries ask for the Pods of that."""
    for nodes, name in ((1, "moebius"), (2, "moebius-hosts")):
        spec = scaler(nodes)["spec"]
        target = spec["scaleTargetRef"]
        manifests = render(merged({"model": MODEL}, OPTIONS, {"engine": {"nodes": nodes}}))
        assert target["name"] == name
        assert (target["kind"], name) in {(one["kind"], one["metadata"]["name"]) for one in manifests}
        for trigger in spec["triggers"]:
            assert f'pod=~"{name}-[0-9]+"' in trigger["metadata"]["query"]
        assert spec["minReplicaCount"] >= 1
        # KEDA's own cool-down is for the last engine alone, which stays.
        check_behavior(spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"])


def check_behavior(behavior: dict[str, Any]) -> None:
    """Neither one busy moment nor one quiet one changes the number of engines."""
    assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 60
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 1800
    assert behavior["scaleDown"]["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 60}]


@pytest.mark.parametrize("name", CASES)
def test_busy_engines_are_kept(name: str) -> None:
    """For every trigger KEDA asks for value / threshold engines, rounded up; the largest number counts."""
    case = CASES[name]
    thresholds = [float(one["metadata"]["threshold"]) for one in scaler()["spec"]["triggers"]]
    wanted = [math.ceil(value / each) for value, each in zip(case.values, thresholds, strict=True)]
    assert max(wanted) == case.replicas
    busy = sum(count == MAX_NUM_SEQS for count in case.running)
    assert case.replicas >= busy
    # An HPA of Kubernetes divides the sum over all Pods by the average that each should have.
    averages = [quantity(each["pods"]["target"]["averageValue"]) for each in autoscaler()["spec"]["metrics"]]
    by_name = dict(
        zip(
            (each["pods"]["metric"]["name"] for each in autoscaler()["spec"]["metrics"]),
            averages,
            strict=True,
        )
    )
    assert [by_name[f"moebius_engine_{each}"] for each in RECORDED] == thresholds


RECORDED = ("requests_waiting", "busy_ratio", "kv_cache_usage_ratio")


def quantity(text: str) -> float:
    """Returns a Kubernetes quantity: `900m` is 0.9."""
    return int(text[:-1]) / 1000 if text.endswith("m") else float(text)


def hpa_release(nodes: int) -> list[Manifest]:
    """Returns a release whose engines Kubernetes' own autoscaler counts."""
    return render(
        merged({"model": MODEL}, {"autoscaling": {"type": "hpa"}, "engine": {"gpus": 1, "nodes": nodes}})
    )


def autoscaler(nodes: int = 1) -> dict[str, Any]:
    """Returns the engines' HorizontalPodAutoscaler."""
    return next(one for one in hpa_release(nodes) if one["kind"] == "HorizontalPodAutoscaler")


def recorded(nodes: int = 1) -> list[dict[str, str]]:
    """Returns the rules that record what the autoscaler asks for."""
    (rules,) = (one for one in hpa_release(nodes) if one["kind"] == "PrometheusRule")
    found: list[dict[str, str]] = rules["spec"]["groups"][0]["rules"]
    return found


@pytest.mark.parametrize(("nodes", "name"), [(1, "moebius"), (2, "moebius-hosts")])
def test_kubernetes_own_autoscaler_has_what_it_asks_for(nodes: int, name: str) -> None:
    """Its metrics are those that the release records, of the Pods of the workload that it scales."""
    spec = autoscaler(nodes)["spec"]
    kinds = {(one["kind"], one["metadata"]["name"]) for one in hpa_release(nodes)}
    assert (spec["scaleTargetRef"]["kind"], name) in kinds
    assert spec["scaleTargetRef"]["name"] == name
    rules = {rule["record"]: rule["expr"] for rule in recorded(nodes)}
    assert {each["pods"]["metric"]["name"] for each in spec["metrics"]} == set(rules)
    assert all(f'pod=~"{name}-[0-9]+"' in text for text in rules.values())
    check_behavior(spec["behavior"])
    (workload,) = (
        one
        for one in hpa_release(nodes)
        if one["metadata"]["name"] == name and one["kind"] in ("StatefulSet", "LeaderWorkerSet")
    )
    assert "replicas" not in workload["spec"]


def test_queries_have_these_values(tmp_path: Path) -> None:
    """Prometheus computes them from what engines export, and leaves other releases out."""
    tool = promtool()
    if tool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    tests = [document(case) for case in CASES.values()]
    groups = [{"name": "scaling", "rules": recorded()}]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}, width=1000))
    path = tmp_path / "tests.yaml"
    path.write_text(
        yaml.safe_dump(
            {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}, width=1000
        )
    )
    run = subprocess.run([tool, "test", "rules", str(path)], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr


def document(case: Case) -> dict[str, Any]:
    """Returns one test of promtool's."""
    series = []
    for namespace in ("moebius", "others"):
        for index in range(2):
            labels = f'{{namespace="{namespace}", pod="moebius-{index}", model_name="m", engine="0"}}'
            for metric, value in (
                ("vllm:num_requests_running", case.running[index]),
                ("vllm:num_requests_waiting", case.waiting[index]),
                ("moebius:max_num_seqs", MAX_NUM_SEQS),
                ("vllm:kv_cache_usage_perc", case.kv_usage[index]),
            ):
                series.append({"series": metric + labels, "values": f"{value}x5"})
    asked = [
        {
            "expr": trigger["metadata"]["query"],
            "eval_time": "1m",
            "exp_samples": [{"labels": "{}", "value": value}],
        }
        for trigger, value in zip(scaler()["spec"]["triggers"], case.values, strict=True)
    ]
    for rule, figures in zip(
        recorded(),
        (case.waiting, [each / MAX_NUM_SEQS for each in case.running], case.kv_usage),
        strict=True,
    ):
        samples = [
            {
                "labels": f'{rule["record"]}{{namespace="moebius", pod="moebius-{index}"}}',
                "value": float(figures[index]),
            }
            for index in range(2)
        ]
        asked.append({"expr": rule["record"], "eval_time": "2m", "exp_samples": samples})
    return {"interval": "1m", "input_series": series, "promql_expr_test": asked}
