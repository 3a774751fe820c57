"""Guards the number of engines: what is busy is kept, what is not is given up, by KEDA's rule and PromQL."""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.chart import render

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
    # Of the queries in their order, and engines that KEDA asks for.
    values: tuple[float, float]
    replicas: int


CASES = {
    "full steps, empty queues": Case((16, 16), (0, 0), (0.0, 2.0), 3),
    "one is full, the other has nothing": Case((16, 0), (0, 0), (0.0, 1.0), 2),
    "as much as is wanted": Case((12, 13), (0, 0), (0.0, 1.5625), 2),
    "little, which one engine computes": Case((6, 6), (0, 0), (0.0, 0.75), 1),
    "nothing": Case((0, 0), (0, 0), (0.0, 0.0), 0),
    "long queues": Case((16, 16), (9, 7), (16.0, 2.0), 4),
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
        behaviour = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        assert behaviour["scaleDown"]["stabilizationWindowSeconds"] == 1800


@pytest.mark.parametrize("name", CASES)
def test_busy_engines_are_kept(name: str) -> None:
    """For every trigger KEDA asks for value / threshold engines, rounded up; the largest number counts."""
    case = CASES[name]
    thresholds = [float(one["metadata"]["threshold"]) for one in scaler()["spec"]["triggers"]]
    wanted = [math.ceil(value / each) for value, each in zip(case.values, thresholds, strict=True)]
    assert max(wanted) == case.replicas
    busy = sum(count == MAX_NUM_SEQS for count in case.running)
    assert case.replicas >= busy


def test_queries_have_these_values(tmp_path: Path) -> None:
    """Prometheus computes them from what engines export, and leaves other releases out."""
    tool = promtool()
    if tool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    tests = [document(case) for case in CASES.values()]
    (tmp_path / "rules.yaml").write_text("groups: []")
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}, width=1000))
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
    return {"interval": "1m", "input_series": series, "promql_expr_test": asked}
