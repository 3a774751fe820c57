"""Guards scrapes and alerts with a real Prometheus, a Debian package, skipped by name where it is missing."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.helpers.fake_engine import MODEL as SERVED
from tests.helpers.fake_engine import FakeEngine, serving
from tests.helpers.ports import free_port
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
from tests.k8s.alerts import CASES, Case
from tests.k8s.test_monitoring import promtool, rendered
from tests.service.test_gateway_workers import Gateway
from tests.service.test_gateway_workers import gateway as gateway_processes

LIMIT_S = 120.0


def rules() -> list[dict[str, Any]]:
    """Returns the rules of a release."""
    found: list[dict[str, Any]] = rendered("PrometheusRule")["spec"]["groups"]
    return found


def test_every_alert_has_a_case() -> None:
    """One in which it fires, and one in which it does not though the same figures are there."""
    names = [rule["alert"] for rule in rules()[0]["rules"]]
    assert sorted(CASES) == sorted(names)


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_it_should(alert: str, tmp_path: Path) -> None:
    """The alert fires for this release's Pods, not before its time, not for another release, and not for
    healthy figures.
    """
    tool = promtool()
    if tool is None:
        pytest.skip("no promtool: apt-get install prometheus")
    case = CASES[alert]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rules()}, width=1000))
    tests = [
        unit_test(alert, case, case.fires, 'namespace="moebius", pod="moebius-0"', case.labels),
        unit_test(alert, case, case.healthy, 'namespace="moebius", pod="moebius-0"', None),
    ]
    for pod in ('namespace="other", pod="moebius-0"', 'namespace="moebius", pod="others-0"'):
        figures = case.healthy if case.of_absence else case.fires
        tests.append(unit_test(alert, case, figures, pod, case.labels if case.of_absence else None))
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(document))
    run = subprocess.run(
        [tool, "test", "rules", "tests.yaml"], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout + run.stderr


def unit_test(
    alert: str, case: Case, series: dict[str, str], pod: str, labels: dict[str, str] | None
) -> dict[str, Any]:
    """Returns one test of promtool; `labels`: of the alert that is to fire, None: none is."""
    rule = next(one for one in rules()[0]["rules"] if one["alert"] == alert)
    inputs = [{"series": name.replace("POD", pod), "values": values} for name, values in series.items()]
    expected = []
    if labels is not None:
        where = {} if case.of_absence else {"namespace": "moebius"}
        shown = {"severity": rule["labels"]["severity"]} | where | labels
        expected = [{"exp_labels": shown, "exp_annotations": texts_of(rule, shown, case.value)}]
    asked = [{"eval_time": case.at, "alertname": alert, "exp_alerts": expected}]
    if labels is not None and case.not_yet:
        asked.insert(0, {"eval_time": case.not_yet, "alertname": alert, "exp_alerts": []})
    return {"interval": "1m", "input_series": inputs, "alert_rule_test": asked}


def texts_of(rule: dict[str, Any], labels: dict[str, str], value: str) -> dict[str, str]:
    """Returns the texts as Prometheus fills them in."""

    def filled(text: str) -> str:
        text = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda found: labels[found[1]], text)
        return re.sub(r"\{\{ \$value \| humanize(Percentage|Duration)? \}\}", value, text)

    return {name: filled(text) for name, text in rule["annotations"].items()}


@contextlib.contextmanager
def prometheus(config: dict[str, Any], directory: Path) -> Iterator[Callable[..., Any]]:
    """A running one; yields what asks its API: path, parameters -> data."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("no prometheus: apt-get install prometheus")
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config, width=1000))
    address = f"127.0.0.1:{free_port()}"
    command = [program, f"--config.file={directory}/prometheus.yaml", f"--web.listen-address={address}"]
    command += [f"--storage.tsdb.path={directory}/data", "--log.level=warn"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(path: str, **parameters: str) -> Any:
        answer = httpx.get(f"http://{address}/api/v1/{path}", params=parameters, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def answers() -> bool:
        assert process.poll() is None, (directory / "prometheus.log").read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://{address}/-/ready", timeout=5).status_code == 200
        return False

    try:
        until(answers)
        yield ask
    finally:
        process.terminate()
        process.wait(30)


def until(condition: Callable[[], Any]) -> Any:
    """Waits for it; returns what it gave."""
    end = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.2)
    return found


def scrape_jobs(ports: dict[str, int]) -> list[dict[str, Any]]:
    """Returns what the operator makes of the chart's PodMonitor, for Pods that listen here: container ->
    port.
    """
    (monitor,) = [rendered("PodMonitor")]
    relabelings = {
        one["port"]: one.get("metricRelabelings", ()) for one in monitor["spec"]["podMetricsEndpoints"]
    }
    names = {"gateway": "metrics-gw", "engine": "metrics", "expert-0": "metrics-e0"}
    return [
        {
            "job_name": f"moebius/{container}",
            "scrape_interval": "1s",
            "static_configs": [
                {
                    "targets": [f"127.0.0.1:{port}"],
                    "labels": {"namespace": "moebius", "pod": "moebius-0", "container": container},
                }
            ],
            "metric_relabel_configs": [
                {"source_labels": one["sourceLabels"], "regex": one["regex"], "action": one["action"]}
                for one in relabelings[names[container]]
            ],
        }
        for container, port in ports.items()
    ]


def test_prometheus_scrapes_a_gateway_and_judges_it(tmp_path: Path) -> None:
    """Figures of a served request arrive under vLLM's names with the Pod's labels, those of engines are left
    to these; every rule is evaluated without an error; an engine that is gone is noticed, a gateway that
    serves is not."""
    tokenizer = byte_level_tokenizer()
    write_tokenizer(tmp_path, tokenizer)
    engine, address, port = FakeEngine(tmp_path, tokenizer), f"unix:{tmp_path}/engine.sock", free_port()
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": rules()}, width=1000))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(tmp_path / "rules.yaml")],
        "scrape_configs": scrape_jobs({"gateway": port, "engine": free_port()}),
    }
    with contextlib.ExitStack() as stack:
        ask = stack.enter_context(prometheus(config, tmp_path))
        stack.enter_context(serving(engine, address))
        running: Gateway = stack.enter_context(
            gateway_processes((engine, address), tmp_path, gateway_metrics_port=port)
        )
        assert running.post({"model": SERVED, "prompt": "The", "max_tokens": 3}).status_code == 200

        def value(query: str) -> list[str]:
            return [one["value"][1] for one in ask("query", query=query)["result"]]

        selector = 'namespace="moebius", pod="moebius-0", container="gateway"'
        counted = f"sum(vllm:request_success_total{{{selector}}})"
        until(lambda: value(counted) == ["1"])
        assert value('up{container="gateway"}') == ["1"]
        assert value('count({engine!=""})') == []
        judged = until(lambda: evaluated(ask("rules")["groups"][0]["rules"]))
        assert {rule["name"]: rule["lastError"] for rule in judged if rule.get("lastError")} == {}
        # Before its first scrape there is no gateway, either.
        until(lambda: pending(ask("alerts")["alerts"]) == {"MoebiusEngineUnreachable"})


def evaluated(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns all rules, once each was evaluated; else none."""
    return found if all(rule["health"] != "unknown" for rule in found) else []


def pending(alerts: list[dict[str, Any]]) -> set[str]:
    """Returns the names of alerts whose condition holds."""
    return {alert["labels"]["alertname"] for alert in alerts}
