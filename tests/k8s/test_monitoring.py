"""Guards dashboard, alerts and scalers: every query is valid, and asks for metrics that we export."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml
from prometheus_client import CollectorRegistry

from expert_service.host import ExpertHost
from expert_service.metrics import make_registry
from gateway.telemetry.metrics import GatewayMetrics
from gpu_service.memory.ledger import MemoryLedger, export
from gpu_service.telemetry.metrics import EngineMetrics
from moebius.kernels import EngineStats
from tests.helpers.chart import CHART, ROOT, render

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
from tests.k8s.test_chart import MODEL, OPTIONS, merged

# Of Prometheus itself and of the kubelet.
FOREIGN = {"up", "container_cpu_cfs_throttled_periods_total", "container_cpu_cfs_periods_total"}
NAME = re.compile(r"\b((?:vllm|moebius):\w+|up|container_\w+)(?=\s*[{\[])")
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def registries() -> Iterator[CollectorRegistry]:
    """Yields the registries of a gateway, an engine with a GPU and an expert server with everything
    loaded.
    """
    yield GatewayMetrics().registry
    engine = CollectorRegistry()
    metrics = EngineMetrics("m", engine)
    metrics.describe_cache(16, 8, True, 64)
    metrics.describe_limits(4)
    metrics.describe_self_test({0: 0.0})
    plan = SimpleNamespace(lines=[SimpleNamespace(part="KV cache", nbytes=1)])
    ledger = SimpleNamespace(plan=plan, measured={"KV cache": 1}, late_allocations=lambda: 0)
    export(cast(MemoryLedger, ledger), "m", engine)
    yield engine
    ones = np.ones(1, np.uint64)
    each = np.ones((1, 1), np.uint64)
    stats = EngineStats(1, 1, 1.0, 0, 0, 0, 0, 0, ones, ones, ones, ones, each, 1, 1, 1, 1.0)
    loaded = SimpleNamespace(
        engine=SimpleNamespace(packed_bytes=1, num_threads=1, stats=lambda: stats),
        seconds=1.0,
        relative_errors={0: 0.0},
    )
    host = SimpleNamespace(
        is_serving=True,
        loaded=loaded,
        placement=SimpleNamespace(numa_node=0),
        problem="",
        verify_pass_seconds=0.0,
    )
    yield make_registry(cast(ExpertHost, host))


def exported() -> set[str]:
    """Returns the names of all samples."""
    return {
        family.name + suffix
        for registry in registries()
        for family in registry.collect()
        for suffix in SUFFIXES[family.type]
    }


def rendered(kind: str, name: str = "") -> Any:
    """Returns one object of a release with everything on."""
    found = [one for one in render(merged({"model": MODEL}, OPTIONS)) if one["kind"] == kind]
    return next(one for one in found if one["metadata"]["name"].endswith(name))


def queries() -> dict[str, list[str]]:
    """Returns where -> PromQL."""
    dashboard = json.loads((CHART / "files/dashboard.json").read_text())
    panels = {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in dashboard["panels"]
        if panel["type"] != "row"
    }
    rules = rendered("PrometheusRule")["spec"]["groups"][0]["rules"]
    scalers = [one for one in render(merged({"model": MODEL}, OPTIONS)) if one["kind"] == "ScaledObject"]
    assert len(scalers) == 2
    asked = {
        one["metadata"]["name"]: [trigger["metadata"]["query"] for trigger in one["spec"]["triggers"]]
        for one in scalers
    }
    variables = [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    return panels | {rule["alert"]: [rule["expr"]] for rule in rules} | asked | {"variables": variables}


def test_every_query_names_metrics_that_exist() -> None:
    """A panel or alert about a metric that was renamed would be silent for ever."""
    known = exported() | FOREIGN
    names = {}
    for where, texts in queries().items():
        for text in texts:
            # Variables name them without a selector.
            found = set(NAME.findall(text)) or set(re.findall(r"(?:vllm|moebius):\w+", text))
            assert found, (where, text)
            names |= dict.fromkeys(found, where)
    assert {name: where for name, where in names.items() if name not in known} == {}
    assert len(names) >= 30


def test_every_metric_of_ours_that_can_alarm_is_shown() -> None:
    """Counters of faults have a panel."""
    shown = " ".join(text for texts in queries().values() for text in texts)
    for name in sorted(exported()):
        if re.search(
            r"fail|lost|nonfinite|damaged|refused|replayed|preempt|reject|error", name
        ) and name.startswith("moebius"):
            if "self_test" in name or "requantise" in name or name.endswith("inputs_total"):
                continue
            assert name in shown, name


def test_the_dashboard_loads() -> None:
    """Ids and places are unique, nothing overlaps, and the ConfigMap holds the file as it is."""
    text = (CHART / "files/dashboard.json").read_text()
    dashboard = json.loads(text)
    assert json.loads(rendered("ConfigMap", "-dashboard")["data"]["moebius.json"]) == dashboard
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yields where `after` lacks or changes something of `before`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{path}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from lost(*pair, f"{path}/{number}")
    elif before != after:
        yield path


def test_grafana_knows_every_field() -> None:
    """Its own types of dashboards, panels and queries read the file and write it again unchanged: a misspelt
    option, which Grafana would pass over in silence, is lost on the way."""
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()

    def missing(dashboard: Any) -> list[str]:
        again = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
        # What the editor of a variable shows of its query; Grafana writes it, its types do not have it.
        return [one for one in lost(dashboard, again) if not one.endswith("/definition")]

    text = (CHART / "files/dashboard.json").read_text()
    assert missing(json.loads(text)) == []
    wrong = json.loads(text)
    panel = next(one for one in wrong["panels"] if one["type"] == "timeseries")
    panel.setdefault("options", {})["legende"] = panel["fieldConfig"]["defaults"]["lines"] = 1
    panel["targets"][0]["legend"] = "x"
    assert {one.rpartition("/")[2] for one in missing(wrong)} == {"legend", "lines", "legende"}


def test_alerts_are_about_this_release_and_say_what_to_do() -> None:
    """Each has the release's selector, a severity, a summary and a description."""
    rules = rendered("PrometheusRule")["spec"]["groups"][0]["rules"]
    for rule in rules:
        assert 'namespace="moebius", pod=~"moebius-.*"' in rule["expr"]
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def promtool() -> str | None:
    fetched = ROOT / "build" / "promtool"
    return str(fetched) if fetched.exists() else shutil.which("promtool")


def test_prometheus_takes_rules_and_queries(tmp_path: Path) -> None:
    """`promtool check rules` parses every alert, and every panel's query as if it were one."""
    tool = promtool()
    if tool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    groups = rendered("PrometheusRule")["spec"]["groups"]
    recorded = [
        {"record": f"panel:{number}", "expr": text.replace("$__rate_interval", "1m")}
        for number, text in enumerate(
            text for where, texts in queries().items() if where != "variables" for text in texts
        )
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [*groups, {"name": "panels", "rules": recorded}]}))
    checked = subprocess.run([tool, "check", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
