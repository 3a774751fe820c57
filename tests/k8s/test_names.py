"""Guards names in a cluster: every address that a container is given is one of the release's own Pods."""

from __future__ import annotations

import copy
import re

import pytest
import yaml

from tests.helpers.chart import KUSTOMIZE, NO_NAMESPACE, SHAPES, Manifest, render

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
from tests.k8s.names import Pod, pods_of, resolve
from tests.k8s.test_chart import ALL, MODEL, merged

# host:port in arguments, where the host is a name in the cluster.
ADDRESS = re.compile(r"([a-z][-\w]*(?:\.[-\w]+)+):(\d+)")
# The first rank's, which only other ranks ask; no Service and no probe uses it.
MEETING_PORT = 29500


def addresses(pods: list[Pod]) -> dict[str, set[int]]:
    """Returns host -> ports, of all containers."""
    found: dict[str, set[int]] = {}
    for pod in pods:
        for text in pod.arguments():
            assert "$(POD" not in text
            for host, port in ADDRESS.findall(text):
                found.setdefault(host, set()).add(int(port))
    return found


def check_names(manifests: list[Manifest], namespace: str) -> dict[str, set[int]]:
    """Each name leads to Pods, each of which has the port open."""
    named = addresses(pods_of(manifests, namespace))
    for host, ports in named.items():
        found = resolve(host, manifests, namespace)
        assert found, f"{host} does not resolve"
        for pod in found:
            assert ports - {MEETING_PORT} <= pod.ports(), f"{host} is {pod.name}, which has no such port"
    return named


@pytest.mark.parametrize("name", ALL)
def test_every_name_resolves(name: str) -> None:
    """Names of engines, of expert servers and of the hosts of one engine resolve in a namespace of
    any name.
    """
    manifests = render(merged({"model": MODEL}, ALL[name]), namespace="another")
    named = check_names(manifests, "another")
    hosts = [one for one in manifests if one["kind"] == "LeaderWorkerSet"]
    assert len(named) >= 2 * len(hosts)


def test_two_hosts_find_each_other() -> None:
    """The leader and the worker of each group are reached by names of their own, and by those of no other."""
    manifests = render(merged({"model": MODEL}, {"engine": {"gpus": 1, "nodes": 2}}))
    named = check_names(manifests, "moebius")
    by_pod = {
        pod.name: host for host in named for pod in resolve(host, manifests, "moebius") if host.count(".") > 2
    }
    assert by_pod == {
        f"moebius-hosts-{name}": f"moebius-hosts-{name}.moebius-hosts.moebius.svc"
        for name in ("0", "0-1", "1", "1-1")
    }
    assert named["moebius-hosts-1.moebius-hosts.moebius"] == {MEETING_PORT}
    assert resolve("moebius-engine.moebius.svc", manifests, "moebius") == [
        pod for pod in pods_of(manifests, "moebius") if pod.name in ("moebius-hosts-0", "moebius-hosts-1")
    ]


def test_a_leader_worker_set_named_as_a_service_has_no_names() -> None:
    """What the chart once rendered: the gateway's Service stood where LeaderWorkerSet makes its own."""
    manifests = copy.deepcopy(render(merged({"model": MODEL}, {"engine": {"gpus": 1, "nodes": 2}})))
    hosts = next(one for one in manifests if one["kind"] == "LeaderWorkerSet")
    hosts["metadata"]["name"] = "moebius"
    assert resolve("moebius-0.moebius.moebius.svc", manifests, "moebius") == []


@pytest.mark.parametrize("name", SHAPES)
def test_a_kustomize_base_is_for_any_namespace(name: str) -> None:
    """It names none, in no object; its addresses resolve wherever it is applied."""
    text = (KUSTOMIZE / name / "moebius.yaml").read_text()
    assert NO_NAMESPACE not in text
    assert not re.search(r"\bmoebius\.(moebius|svc)\b", text)
    manifests = list(yaml.safe_load_all(text))
    assert all("namespace" not in one["metadata"] for one in manifests)
    for namespace in ("moebius", "another"):
        check_names(manifests, namespace)
