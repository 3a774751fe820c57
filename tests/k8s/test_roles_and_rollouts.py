"""Guards roles, rollouts, claims and networks of a release: who is where, who writes, who reaches what."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.chart import Manifest, Values, render

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
from tests.k8s.manifests import check_manifest, pod_specs
from tests.k8s.names import resolve
from tests.k8s.test_chart import MODEL, REMOTE_TLS, all_containers, merged

COMPONENT = "app.kubernetes.io/component"
HOST = "kubernetes.io/hostname"
DOWNLOAD: Values = {
    "type": "download",
    "pvc": {"claimName": ""},
    "download": {"repository": "org/model", "claimName": "models", "tokenSecret": "hub"},
}


def release(*values: Values) -> list[Manifest]:
    """Returns checked manifests."""
    manifests = render(merged({"model": MODEL}, *values))
    for manifest in manifests:
        check_manifest(manifest)
    return manifests


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind]


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Returns component -> Pod."""
    return {pod["metadata"]["labels"][COMPONENT]: pod for pod in pod_specs(manifests)}


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a label selector has a Pod with these labels."""
    expressions = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )


def test_each_role_has_its_priority_and_spread() -> None:
    """A role's own values replace those for all; a constraint without a selector counts the role's Pods."""
    zone = {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
    rack = {"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"}
    selected = rack | {"labelSelector": {"matchLabels": {"a": "b"}}}
    found = pods(
        release(
            {"priorityClassName": "all", "topologySpreadConstraints": [zone]},
            {"engine": {"gpus": 1, "priorityClassName": "gpu"}},
            {"experts": {"mode": "remote", "topologySpreadConstraints": [selected]}},
            {"gateway": {"topologySpreadConstraints": [rack], "priorityClassName": ""}},
        )
    )
    priorities = {name: pod["spec"].get("priorityClassName") for name, pod in found.items()}
    assert priorities == {"engine": "gpu", "experts": "all", "gateway": None, "test": None}
    spread = {name: pod["spec"].get("topologySpreadConstraints") for name, pod in found.items()}
    assert spread["experts"] == [selected]
    for name, constraint in (("engine", zone), ("gateway", rack)):
        (only,) = spread[name]
        assert selects(only["labelSelector"], found[name]["metadata"]["labels"])
        assert only == constraint | {"labelSelector": only["labelSelector"]}
        others = [pod["metadata"]["labels"] for other, pod in found.items() if other != name]
        assert not any(selects(only["labelSelector"], labels) for labels in others)


def test_one_budget_counts_all_pods_of_a_group() -> None:
    """An eviction of a worker stops its engine as one of the leader does; every Pod that serves has exactly
    one budget."""
    for values in (
        {"engine": {"gpus": 1, "nodes": 2}},
        {"engine": {"gpus": 1}, "experts": {"mode": "remote"}},
    ):
        manifests = release(values)
        budgets = [one["spec"]["selector"] for one in of_kind(manifests, "PodDisruptionBudget")]
        for name, pod in pods(manifests).items():
            labels = pod["metadata"]["labels"]
            assert sum(selects(one, labels) for one in budgets) == (name != "test"), name


def test_requests_are_divided_between_releases() -> None:
    """Weights are those of the values, and none stands where there is one release only; the policy by which
    a Gateway checks the other release's certificate comes with that release, which has no route."""
    route: Values = {"enabled": True, "parentRefs": [{"name": "public"}]}
    (alone,) = of_kind(release({"route": route}), "HTTPRoute")
    assert alone["spec"]["rules"][0]["backendRefs"] == [{"name": "moebius", "port": 80}]
    others = [{"name": "next-moebius", "port": 8443, "weight": 5}, {"name": "old", "weight": 0}]
    (divided,) = of_kind(release({"route": {**route, "weight": 95, "others": others}}), "HTTPRoute")
    assert divided["spec"]["rules"][0]["backendRefs"] == [
        {"name": "moebius", "port": 80, "weight": 95},
        {"name": "next-moebius", "port": 8443, "weight": 5},
        {"name": "old", "port": 80, "weight": 0},
    ]
    canary = release({"tls": {"http": {"secretName": "web"}}, "route": {"backendCaConfigMap": "ca"}})
    assert len(of_kind(canary, "BackendTLSPolicy")) == 1
    assert of_kind(canary, "HTTPRoute") == []


def test_engines_below_the_partition_stay() -> None:
    """StatefulSets and LeaderWorkerSets have it where their controllers read it."""
    (stateful,) = of_kind(release({"replicas": 3, "rollout": {"partition": 2}}), "StatefulSet")
    assert stateful["spec"]["updateStrategy"]["rollingUpdate"] == {"partition": 2}
    rollout = {"partition": 1, "maxSurge": 1, "maxUnavailable": 0}
    (hosts,) = of_kind(
        release({"replicas": 2, "engine": {"gpus": 1, "nodes": 2}, "rollout": rollout}), "LeaderWorkerSet"
    )
    assert hosts["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"] == rollout


def required_hosts(pod: Manifest) -> list[Manifest]:
    """Returns the selectors of Pods on whose node this one has to be."""
    terms = pod["spec"].get("affinity", {}).get("podAffinity", {})
    found = terms.get("requiredDuringSchedulingIgnoredDuringExecution", ())
    assert all(term["topologyKey"] == HOST for term in found)
    return [term["labelSelector"] for term in found]


@pytest.mark.parametrize(
    "source", [{"pvc": {"accessMode": "ReadWriteOnce"}}, DOWNLOAD], ids=["pvc", "download"]
)
def test_a_claim_of_one_node_keeps_its_pods_together(source: Values) -> None:
    """With ReadWriteOnce all Pods that mount the model are sent to the engine's node, and no other is;
    a claim of many nodes binds none."""
    once = merged(source, {"download": {"accessMode": "ReadWriteOnce"}} if source is DOWNLOAD else {})
    found = pods(release({"model": {"source": once}, "node": {"features": {"amx": True}}}))
    engine = found["engine"]["metadata"]["labels"]
    for name, pod in found.items():
        mounts = {mount["name"] for one in all_containers(pod) for mount in one["volumeMounts"]}
        is_bound = "models" in mounts and name != "engine"
        assert [selects(one, engine) for one in required_hosts(pod)] == [True] * is_bound, name
    assert "nodeAffinity" not in found["gateway"]["spec"]["affinity"]
    many = pods(release({"model": {"source": DOWNLOAD}}))
    assert all(required_hosts(pod) == [] for pod in many.values())


def test_one_job_writes_and_all_others_wait_and_read() -> None:
    """The Job alone mounts the claim for writing and has the token; every other Pod that reads the model
    waits for the same choice of files; another choice is another Job."""
    values: Values = {"model": {"source": DOWNLOAD}, "experts": {"mode": "remote"}}
    manifests = release(values)
    (job,) = of_kind(manifests, "Job")
    asked = job["spec"]["template"]["spec"]["containers"][0]["args"]
    assert asked[:5] == ["models", "download", "/models/m", "--hub", "org/model"]
    found = pods(manifests)
    for name, pod in found.items():
        (claim,) = [one for one in pod["spec"]["volumes"] if one["name"] == "models"] or [None]
        if claim is None:
            assert name == "test"
            continue
        writes = not claim["persistentVolumeClaim"].get("readOnly", False)
        secrets = [one["secret"]["secretName"] for one in pod["spec"]["volumes"] if "secret" in one]
        assert writes == (name == "download") == ("hub" in secrets), name
        if name != "download":
            waits = pod["spec"]["initContainers"][0]["args"]
            assert waits == [*asked[:5], "--wait"], name
    changed = merged(values, {"model": {"source": {"download": {"revision": "v2"}}}})
    (other,) = of_kind(release(changed), "Job")
    assert other["metadata"]["name"] != job["metadata"]["name"]
    # An upgrade cannot change a Job: another image is another one, which finds the files there.
    (upgraded,) = of_kind(release(merged(values, {"image": {"tag": "2"}})), "Job")
    assert upgraded["metadata"]["name"] != job["metadata"]["name"]
    (again,) = of_kind(release(values), "Job")
    assert again == job
    gguf = merged(values, {"model": {"path": "m/model-Q4_K_M.gguf"}})
    (third,) = of_kind(release(gguf), "Job")
    assert third["spec"]["template"]["spec"]["containers"][0]["args"][2] == "/models/m"


def test_each_pod_has_kernels_of_its_own() -> None:
    """perPod: a claim is made for each Pod of the engine, leaders and workers; no other Pod has it."""
    for nodes, kind in ((1, "StatefulSet"), (2, "LeaderWorkerSet")):
        cache = {"type": "perPod", "sizeMiB": 512, "storageClassName": "fast"}
        manifests = release({"engine": {"gpus": 1, "nodes": nodes, "jitCache": cache}, "replicas": 2})
        (workload,) = of_kind(manifests, kind)
        owner = workload["spec"] if nodes == 1 else workload["spec"]["leaderWorkerTemplate"]
        (claim,) = owner["volumeClaimTemplates"]
        assert claim["spec"] == {
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "fast",
            "resources": {"requests": {"storage": "512Mi"}},
        }
        for name, pod in pods(manifests).items():
            volumes = {one["name"] for one in pod["spec"]["volumes"]}
            assert ("cache" in volumes) == (name == "gateway"), name


def egress(policy: Manifest) -> list[Any]:
    """Returns the ports of each rule; None: all."""
    return [[port["port"] for port in rule.get("ports", ())] or None for rule in policy["spec"]["egress"]]


def test_pods_reach_each_other_names_and_what_is_configured() -> None:
    """The Job alone reaches the hub's port; without a Job, every Pod has to; a collector's port is that of
    its address."""
    on: Values = {"networkPolicy": {"enabled": True, "egress": {"enabled": True}}}
    plain = of_kind(release({"networkPolicy": {"enabled": True}}), "NetworkPolicy")
    assert [one["spec"]["policyTypes"] for one in plain] == [["Ingress"]]
    manifests = release(on, {"model": {"source": DOWNLOAD}, "monitoring": {"otlpEndpoint": "http://c:4318/"}})
    policies = {one["metadata"]["name"]: one for one in of_kind(manifests, "NetworkPolicy")}
    assert egress(policies["moebius"]) == [None, [53, 53], [4318]]
    assert policies["moebius"]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert egress(policies["moebius-download"]) == [[443]]
    for name, pod in pods(manifests).items():
        labels = pod["metadata"]["labels"]
        assert selects(policies["moebius"]["spec"]["podSelector"], labels), name
        is_job = selects(policies["moebius-download"]["spec"]["podSelector"], labels)
        assert is_job == (name == "download")
    (to,) = [rule["to"] for rule in policies["moebius"]["spec"]["egress"] if "ports" not in rule]
    assert selects(to[0]["podSelector"], pods(manifests)["engine"]["metadata"]["labels"])
    in_pods = merged(DOWNLOAD, {"download": {"claimName": ""}})
    (only,) = of_kind(release(on, {"model": {"source": in_pods}}), "NetworkPolicy")
    assert egress(only) == [None, [53, 53], [443]]
    by_url = {"repository": "", "baseUrl": "https://host:8443/m", "files": {"a": "0" * 64}}
    (_, fetches) = of_kind(
        release(on, {"model": {"source": merged(DOWNLOAD, {"download": by_url})}}), "NetworkPolicy"
    )
    assert egress(fetches) == [[8443]]
    rule = {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}
    (own,) = of_kind(release(on, {"networkPolicy": {"egress": {"rules": [rule]}}}), "NetworkPolicy")
    assert own["spec"]["egress"][-1] == rule


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "mutual TLS"])
def test_helm_test_asks_the_service(has_tls: bool) -> None:
    """It calls the Service's name and port, as a client with what clients need; Helm alone creates it."""
    secure = merged(
        REMOTE_TLS,
        {"helmTest": {"clientSecretName": "tester"}, "gateway": {"apiKeySecret": "keys"}},
        {"route": {"enabled": True, "parentRefs": [{"name": "g"}]}},
    )
    manifests = release(secure if has_tls else {})
    (pod,) = of_kind(manifests, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    scheme, _, address = pod["spec"]["containers"][0]["args"][1].partition("://")
    host, _, port = address.partition(":")
    assert scheme == ("https" if has_tls else "http")
    gateways = resolve(host, manifests, "moebius")
    assert {each.labels[COMPONENT] for each in gateways} == {"gateway"}
    service = next(one for one in of_kind(manifests, "Service") if one["metadata"]["name"] == "moebius")
    assert [each["port"] for each in service["spec"]["ports"]] == [int(port)]
    for container in pod["spec"]["containers"]:
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        files = [word for word in container["args"] if word.startswith("/")]
        assert len(files) == 4 * has_tls
        assert {file.rpartition("/")[0] for file in files} <= mounted
    without = merged(secure, {"helmTest": {"clientSecretName": ""}})
    assert of_kind(release(without), "Pod") == []


def test_an_ingress_leads_to_the_service() -> None:
    """Each host has a rule, without hosts there is one for all; the certificate is for these hosts."""
    (bare,) = of_kind(release({"ingress": {"enabled": True}}), "Ingress")
    assert [rule.get("host") for rule in bare["spec"]["rules"]] == [None]
    hosts = ["a.example.com", "*.b.example.com"]
    values: Values = {
        "ingress": {"enabled": True, "className": "nginx", "hosts": hosts, "tlsSecretName": "web"},
        "gateway": {"service": {"port": 8080}},
    }
    (named,) = of_kind(release(values), "Ingress")
    assert [rule["host"] for rule in named["spec"]["rules"]] == hosts
    assert named["spec"]["tls"] == [{"secretName": "web", "hosts": hosts}]
    for rule in named["spec"]["rules"]:
        (path,) = rule["http"]["paths"]
        assert path["backend"]["service"] == {"name": "moebius", "port": {"number": 8080}}


@pytest.mark.parametrize("mode", ["grouped", "individual"])
def test_claims_of_cpus_are_what_containers_request(mode: str) -> None:
    """A claim takes as many CPUs of a group as its container requests (dra-driver-cpu counts both); single
    CPUs are as many devices."""
    dra = {"enabled": True, "cpuDeviceMode": mode}
    manifests = release({"experts": {"numa": "kubelet", "cpus": 12}, "dra": dra})
    containers = {one["name"]: one for one in all_containers(pods(manifests)["engine"])}
    templates = {one["metadata"]["name"]: one for one in of_kind(manifests, "ResourceClaimTemplate")}
    assert len(templates) == 2
    for index in range(2):
        (request,) = templates[f"moebius-cpus-{index}"]["spec"]["spec"]["devices"]["requests"]
        asked = request["exactly"]
        cpus = containers[f"expert-{index}"]["resources"]["requests"]["cpu"]
        assert containers[f"expert-{index}"]["resources"]["claims"] == [{"name": f"cpus-{index}"}]
        if mode == "grouped":
            assert asked["count"] == 1
            assert asked["capacity"] == {"requests": {"dra.cpu/cpu": cpus}}
        else:
            assert asked["count"] == int(cpus)
            assert "capacity" not in asked
        assert asked["selectors"][0]["cel"]["expression"].endswith(f"numaNode == {index}")
