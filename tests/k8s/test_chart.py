"""Guards the Helm chart: what it renders is valid and can run, and what could not run is refused in words."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from moebius.config.loader import load_config
from tests.helpers.chart import (
    CHART,
    KUSTOMIZE,
    SCHEMA,
    SHAPES,
    Manifest,
    Refused,
    Values,
    base_text,
    helm_cli,
    kubectl_kustomize,
    kustomization_text,
    render,
    schema_with_settings,
    shape_values,
)

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
from tests.k8s.commands import check_command
from tests.k8s.manifests import OLDEST, check_manifest, pod_specs
from tests.k8s.refusals import REFUSED

SOURCES: dict[str, Values] = {
    "pvc": {"type": "pvc", "pvc": {"claimName": "models"}},
    "hostPath": {"type": "hostPath", "hostPath": {"path": "/srv/models"}},
    "image": {"type": "image", "image": {"reference": "registry.example.com/models/m:1"}},
    "download": {
        "type": "download",
        "download": {
            "baseUrl": "https://hub.example.com/org/model/resolve/abc",
            "files": {"config.json": "0" * 64, "model-00001.safetensors": "a" * 64},
            "tokenSecret": "hub",
        },
    },
}
SOURCES["hub, one Job"] = {
    "type": "download",
    "download": {"repository": "org/model:Q4_K_M", "revision": "v1", "claimName": "models"},
}
MODEL: Values = {"path": "m", "source": SOURCES["pvc"]}


def merged(*trees: Values) -> Values:
    """Later ones win, key by key."""
    result: Values = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def shapes() -> dict[str, Values]:
    """GPUs × NUMA nodes × where experts are × how they are split, and each option once or more."""
    found: dict[str, Values] = {}
    for gpus, servers, mode in itertools.product((0, 1, 2, 4, 8), (1, 2, 3, 8), ("pod", "remote")):
        split = "tensor" if (gpus + servers) % 2 else "expert"
        experts = {"mode": mode, "servers": servers, "split": split}
        found[f"{gpus} GPUs, {servers} {mode} {split}"] = {"engine": {"gpus": gpus}, "experts": experts}
    for gpus, pipeline, nodes in ((8, 1, 2), (8, 2, 2), (4, 2, 1), (1, 4, 4), (8, 8, 8)):
        engine = {"gpus": gpus, "pipelineParallel": pipeline, "nodes": nodes}
        for mode in ("pod", "remote"):
            found[f"{nodes} hosts of {gpus}, {pipeline} stages, {mode}"] = {
                "engine": engine,
                "experts": {"mode": mode},
            }
    for volume in ("memory", "hugepages-2Mi", "hostPath", "none"):
        weights = {"volume": volume, "hostPath": "/mnt/weights" if volume == "hostPath" else ""}
        found[f"weights {volume}"] = {"experts": {"weights": weights, "numa": "kubelet"}}
    for name, source in SOURCES.items():
        found[f"source {name}"] = {"model": {"source": merged({"pvc": {"claimName": ""}}, source)}}
    unequal = {
        "servers": 2,
        "shares": [3, 1],
        "overrides": [{"cpus": 12, "memoryMiB": 12288, "weightsMiB": 9000}, {}],
    }
    found["unequal nodes"] = {"experts": unequal}
    found["all resident"] = {"engine": {"gpus": 4}, "experts": {"mode": "none"}, "replicas": 3}
    found["all options"] = OPTIONS
    found["all options, several hosts"] = merged(OPTIONS, {"engine": {"gpus": 2, "nodes": 2}})
    found["gateway in the Pod"] = {"gateway": {"inPod": True, "apiKeySecret": "keys"}}
    found["InferencePool"] = {
        "gateway": {"inPod": True},
        "route": {
            "enabled": True,
            "parentRefs": [{"name": "public"}],
            "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
        },
    }
    tls = {"grpc": {"mode": "mutual", "secretName": "grpc"}, "http": {"secretName": "http"}}
    found["TLS without clients' certificates"] = {"tls": {"grpc": {"mode": "tls", "secretName": "grpc"}}}
    found["mTLS in one Pod"] = {"gateway": {"inPod": True}, "tls": tls}
    found["HTTPS alone"] = {"tls": {"http": tls["http"]}}
    found["mTLS, several hosts"] = {"engine": {"gpus": 2, "nodes": 2}, "tls": tls}
    found["mTLS, remote experts, all options"] = merged(OPTIONS, REMOTE_TLS)
    found["batches on a claim"] = {"gateway": {"batches": {"type": "pvc", "claimName": "b"}}}
    found["batches in one Pod"] = {"gateway": {"inPod": True, "batches": {"type": "emptyDir"}}}
    for mode in ("grouped", "individual"):
        dra = {"enabled": True, "cpuDeviceMode": mode}
        found[f"DRA, {mode}"] = {"engine": {"gpus": 2}, "experts": {"numa": "kubelet"}, "dra": dra}
    return found | rollouts_and_claims()


def rollouts_and_claims() -> dict[str, Values]:
    """Rollouts, routes, claims and networks."""
    once = {"pvc": {"accessMode": "ReadWriteOnce"}}
    download = {"repository": "org/model", "claimName": "m", "accessMode": "ReadWriteOnce"}
    route = {"enabled": True, "parentRefs": [{"name": "public"}]}
    egress = {"enabled": True, "egress": {"enabled": True, "dns": [{"namespaceSelector": {}}]}}
    return {
        "canary": {"route": {**route, "weight": 90, "others": [{"name": "next-moebius", "weight": 10}]}},
        "groups that surge": {
            "engine": {"gpus": 1, "nodes": 2},
            "rollout": {"partition": 1, "maxSurge": 1, "maxUnavailable": 0},
        },
        "Ingress": {
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "hosts": ["m.example.com"],
                "tlsSecretName": "web",
                "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
            }
        },
        "scaled by HPA": {"autoscaling": {"type": "hpa"}},
        "hosts scaled by HPA": {"engine": {"gpus": 1, "nodes": 2}, "autoscaling": {"type": "hpa"}},
        "a claim of one node": {"model": {"source": once}},
        "a claim of one node, one Job": {
            "model": {"source": {"type": "download", "pvc": {"claimName": ""}, "download": download}},
            "networkPolicy": egress,
        },
        "claims of kernels": {"replicas": 2, "engine": {"gpus": 1, "jitCache": {"type": "perPod"}}},
        "claims of kernels, several hosts": {
            "engine": {"gpus": 1, "nodes": 2, "jitCache": {"type": "perPod", "storageClassName": "fast"}}
        },
        "egress": merged(OPTIONS, {"networkPolicy": egress}),
    }


OPTIONS: Values = {
    "image": {"digest": "sha256:" + "1" * 64, "pullSecrets": [{"name": "registry"}]},
    "engine": {"gpus": 2, "runtimeClassName": "nvidia", "jitCache": {"type": "pvc", "claimName": "jit"}},
    "experts": {"numa": "kubelet", "cpus": 20},
    "gateway": {
        "apiKeySecret": "keys",
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "autoscaling": {"type": "keda", "minReplicas": 2},
    },
    "autoscaling": {"type": "keda", "prometheusAddress": "http://prometheus:9090"},
    "route": {"enabled": True, "parentRefs": [{"name": "public"}], "hostnames": ["m.example.com"]},
    "config": {"gpu": {"max_num_seqs": 32, "kv_cache_gib": 4}, "model": {"max_model_len": 1000000}},
    "node": {
        "numaNodes": 2,
        "cpusPerNumaNode": 32,
        "threadsPerCore": 2,
        "topologyPolicy": "restricted",
        "features": {"avx512": True, "amx": True, "numa": True},
    },
    "schedulerName": "topology-aware",
    "priorityClassName": "high",
    "nodeSelector": {"disk": "fast"},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
    "monitoring": {
        "podMonitor": True,
        "prometheusRule": True,
        "dashboard": True,
        "otlpEndpoint": "http://collector:4317",
    },
    "preflight": {"strict": True},
    "extraVolumes": [{"name": "extra", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    "extraEnv": [{"name": "NCCL_DEBUG", "value": "WARN"}],
    "podLabels": {"team": "a"},
    "podAnnotations": {"note": "b"},
}
REMOTE_TLS: Values = {
    "experts": {"mode": "remote"},
    "route": {"backendCaConfigMap": "ca"},
    "tls": {
        "grpc": {
            "mode": "mutual",
            "secretName": "engines",
            "gatewaySecretName": "gateways",
            "expertsSecretName": "experts",
            "serverName": "moebius.internal",
        },
        "http": {"secretName": "web", "clientCaSecretName": "clients"},
        "certManager": {"enabled": True, "issuer": {"name": "ca"}, "hosts": ["m.example.com"]},
    },
}
ALL = shapes()


SERVING = ("gateway", "engine", "engine-worker", "experts")


def test_there_are_enough_shapes() -> None:
    """There are at least sixty shapes."""
    assert len(ALL) >= 60


@pytest.mark.parametrize("name", ALL)
def test_a_shape_is_valid_and_consistent(name: str, tmp_path: Path) -> None:
    """Strict schemas take every object; containers, volumes, ports, settings and commands fit one another."""
    manifests = render(merged({"model": MODEL}, ALL[name]))
    for manifest in manifests:
        check_manifest(manifest)
    settings = next(one for one in manifests if one["kind"] == "ConfigMap" and "moebius.yaml" in one["data"])
    path = tmp_path / "moebius.yaml"
    path.write_text(settings["data"]["moebius.yaml"])
    config = load_config(path)
    pods = pod_specs(manifests)
    for pod in pods:
        is_engine = "engine" in pod["metadata"]["labels"]["app.kubernetes.io/component"]
        claims = claim_names(manifests) if is_engine else set()
        check_pod(pod, config.supervisor.stop_timeout_s, claims)
        for container in all_containers(pod):
            check_command(container, path)
    engines = [pod for pod in pods if "engine" in pod["metadata"]["labels"]["app.kubernetes.io/component"]]
    assert config.experts.split_count == max(1, int(expected_servers(merged({"model": MODEL}, ALL[name]))))
    assert (config.experts.mailbox == "moebius") == (
        config.experts.expert_transport == "mailbox" and has_experts(name)
    )
    for pod in engines:
        assert is_guaranteed(pod)
    check_services(manifests)


def has_experts(name: str) -> bool:
    return ALL[name].get("experts", {}).get("mode") != "none"


def expected_servers(values: Values) -> int:
    """Returns the number of servers expected on all hosts of one engine."""
    experts, nodes = values.get("experts", {}), values.get("engine", {}).get("nodes", 1)
    if experts.get("mode") == "none":
        return 0
    return int(experts.get("servers", 2)) * (nodes if experts.get("mode", "pod") == "pod" else 1)


def all_containers(pod: Manifest) -> list[Manifest]:
    return [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]


def claim_names(manifests: list[Manifest]) -> set[str]:
    """Returns the names of volumes that workloads make a claim for in each of their Pods."""
    specs = [manifest.get("spec", {}) for manifest in manifests]
    specs += [spec["leaderWorkerTemplate"] for spec in specs if "leaderWorkerTemplate" in spec]
    return {claim["metadata"]["name"] for spec in specs for claim in spec.get("volumeClaimTemplates", ())}


def check_pod(pod: Manifest, drain_s: float, claims: set[str]) -> None:
    """Mounts have volumes, probes ask ports that are open, and there is time to drain."""
    spec = pod["spec"]
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert len(volumes) == len(spec["volumes"])
    volumes |= claims
    mounted = set()
    for container in all_containers(pod):
        names = [mount["name"] for mount in container["volumeMounts"]]
        mounted |= set(names)
        assert set(names) <= volumes, container["name"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        ports = {port["containerPort"] for port in container.get("ports", ())}
        port_names = {port["name"] for port in container.get("ports", ())}
        listening = " ".join(container["args"])
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            # A kubelet's gRPC probe speaks no TLS.
            assert "grpc" not in container.get(kind, {})
            if kind in container:
                assert container[kind]["httpGet"]["port"] in port_names
        for port in re.findall(r"0\.0\.0\.0:(\d+)", listening):
            assert int(port) in ports
    assert mounted == volumes
    if pod["metadata"]["labels"]["app.kubernetes.io/component"] in SERVING:
        assert spec["terminationGracePeriodSeconds"] >= drain_s + 20
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"]
    ports = [port["containerPort"] for one in all_containers(pod) for port in one.get("ports", ())]  # type: ignore[assignment]
    assert len(set(ports)) == len(ports)


def is_guaranteed(pod: Manifest) -> bool:
    """Equal requests and limits everywhere, and whole CPUs of all that compute."""
    for container in all_containers(pod):
        resources = container["resources"]
        if resources["requests"] != resources["limits"] or not {"cpu", "memory"} <= set(resources["limits"]):
            return False
        if container["name"] not in ("preflight", "download") and not resources["limits"]["cpu"].isdigit():
            return False
    return True


def check_services(manifests: list[Manifest]) -> None:
    """Every Service selects Pods that have its port."""
    pods = pod_specs(manifests)
    for service in (one for one in manifests if one["kind"] == "Service"):
        selected = [
            pod for pod in pods if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        ]
        assert selected, service["metadata"]["name"]
        for port in service["spec"]["ports"]:
            for pod in selected:
                names = {one["name"] for part in all_containers(pod) for one in part.get("ports", ())}
                assert port["targetPort"] in names


@pytest.mark.parametrize(("values", "sentence"), REFUSED, ids=[sentence[:40] for _, sentence in REFUSED])
def test_what_could_not_run_is_refused(values: Values, sentence: str) -> None:
    """The sentence names the values, and what is allowed."""
    with pytest.raises(Refused, match=re.escape(sentence)):
        render(merged({"model": MODEL}, values))


def mounted_secrets(pod: Manifest) -> dict[str, set[str]]:
    """Container -> Secrets it sees."""
    secrets = {one["name"]: one["secret"]["secretName"] for one in pod["spec"]["volumes"] if "secret" in one}
    return {
        one["name"]: {secrets[mount["name"]] for mount in one["volumeMounts"] if mount["name"] in secrets}
        for one in all_containers(pod)
    }


def scheduling(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Returns component -> its Pods' specification."""
    pods = pod_specs(manifests)
    return {pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["spec"] for pod in pods}


def test_each_component_has_nodes_of_its_own() -> None:
    """GPU engines, gateways and remote expert servers go where their own values say, or those for all; what
    is asked of CPUs is asked of nodes whose CPUs compute experts."""
    everywhere = {"nodeSelector": {"pool": "all"}, "tolerations": [{"key": "all"}]}
    values = merged(
        {"model": MODEL, "engine": {"gpus": 1}, "experts": {"mode": "remote"}},
        everywhere,
        {"node": {"features": {"amx": True}}},
    )
    found = scheduling(render(values))
    for component in ("engine", "experts"):
        assert {key: found[component][key] for key in everywhere} == everywhere
    assert found["gateway"]["tolerations"] == everywhere["tolerations"]
    assert "nodeSelector" not in found["gateway"]
    assert "AMXINT8" in json.dumps(found["experts"]["affinity"])
    assert "AMXINT8" not in json.dumps(found["engine"]["affinity"])
    own: Values = {
        component: {
            "nodeSelector": {"pool": component},
            "tolerations": [{"key": component, "operator": "Exists"}],
            "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        }
        for component in ("engine", "experts", "gateway")
    }
    manifests = render(merged(values, own))
    for manifest in manifests:
        check_manifest(manifest)
    found = scheduling(manifests)
    for component in own:
        spec = found[component]
        for key in ("nodeSelector", "tolerations"):
            assert spec[key] == own[component][key], component
        assert "podAffinity" in spec["affinity"], component
    # Empty is a value, too: no node is asked for, where all others ask for one.
    bare = scheduling(render(merged(values, {"experts": {"nodeSelector": {}, "tolerations": []}})))
    assert not {"nodeSelector", "tolerations"} & set(bare["experts"])


def test_certificates_reach_those_who_speak(tmp_path: Path) -> None:
    """Each process has the Secret of its part, at the paths that the settings name, and no other's; the
    issuer is asked for the names by which each is reached."""
    manifests = render(merged({"model": MODEL}, ALL["mTLS, remote experts, all options"]))
    gateway, engine, experts = (
        next(
            pod
            for pod in pod_specs(manifests)
            if pod["metadata"]["labels"]["app.kubernetes.io/component"] == name
        )
        for name in ("gateway", "engine", "experts")
    )
    assert mounted_secrets(gateway)["gateway"] == {"gateways", "web", "clients", "keys"}
    assert mounted_secrets(engine) == {"preflight": {"engines"}, "engine": {"engines"}}
    assert mounted_secrets(experts) == {"preflight": {"experts"}, "expert-0": {"experts"}}
    settings = next(one["data"]["moebius.yaml"] for one in manifests if "moebius.yaml" in one.get("data", {}))
    paths = set(re.findall(r"/etc/moebius-tls/\S+", settings))
    places = {mount["mountPath"] for mount in gateway["spec"]["containers"][0]["volumeMounts"]}
    assert {path.rpartition("/")[0] for path in paths} == {one for one in places if "moebius-tls" in one}
    names = {
        one["spec"]["secretName"]: set(one["spec"]["dnsNames"])
        for one in manifests
        if one["kind"] == "Certificate"
    }
    assert set(names) == {"engines", "gateways", "experts", "web"}
    assert {"moebius-engine.moebius.svc", "moebius.internal"} <= names["engines"]
    assert {"*.moebius-experts.moebius.svc", "moebius.internal"} <= names["experts"]
    assert {"moebius.moebius.svc", "m.example.com"} <= names["web"]
    assert not names["gateways"] & (names["web"] - {"localhost"})


@pytest.mark.parametrize(
    ("gateway", "strategy"),
    [
        ({"batches": {"type": "pvc", "claimName": "b"}}, {"type": "Recreate"}),
        (
            {"replicas": 2, "batches": {"type": "pvc", "claimName": "b", "accessMode": "ReadWriteMany"}},
            {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        ),
    ],
    ids=["ReadWriteOnce", "ReadWriteMany"],
)
def test_a_claim_for_batches_is_the_gateways(gateway: Values, strategy: Values) -> None:
    """Gateways alone have it, where the settings say; one that a single node mounts is never waited for by a
    successor while its predecessor holds it."""
    manifests = render({"model": MODEL, "gateway": gateway})
    settings = next(one["data"]["moebius.yaml"] for one in manifests if "moebius.yaml" in one.get("data", {}))
    directory = yaml.safe_load(settings)["gateway"]["batch_dir"]
    claims = {
        (pod["metadata"]["labels"]["app.kubernetes.io/component"], mount["mountPath"])
        for pod in pod_specs(manifests)
        for volume in pod["spec"]["volumes"]
        if volume.get("persistentVolumeClaim", {}).get("claimName") == "b"
        for container in all_containers(pod)
        for mount in container["volumeMounts"]
        if mount["name"] == volume["name"] and not mount.get("readOnly")
    }
    assert claims == {("gateway", directory)}
    (deployment,) = (one for one in manifests if one["kind"] == "Deployment")
    assert deployment["spec"]["strategy"] == strategy


def test_every_address_is_one_that_certificates_are_for() -> None:
    """Engines, ranks' meeting place and expert servers are reached by names that the issuer is asked for."""
    for name in ("mTLS, several hosts", "mTLS, remote experts, all options"):
        values = merged(
            {"model": MODEL}, ALL[name], {"tls": {"certManager": REMOTE_TLS["tls"]["certManager"]}}
        )
        manifests = render(values)
        asked = [
            host for one in manifests if one["kind"] == "Certificate" for host in one["spec"]["dnsNames"]
        ]
        text = json.dumps(manifests).replace("$(GROUP_INDEX)", "0").replace("$(POD_NAMESPACE)", "moebius")
        addresses = set(re.findall(r"(moebius[-\w]*(?:\.[-\w]+)*\.svc):\d+", text))
        assert len(addresses) >= 3, name
        for address in addresses:
            wildcard = "*." + address.partition(".")[2]
            assert address in asked or wildcard in asked, address


def test_figures_are_scraped_once() -> None:
    """A gateway shows its engines' figures, too: where these are scraped themselves, that part is left out;
    and every port that is named is one of the Pods'."""
    manifests = render(merged({"model": MODEL}, OPTIONS))
    endpoints = next(one for one in manifests if one["kind"] == "PodMonitor")["spec"]["podMetricsEndpoints"]
    ports = {
        port["name"]
        for pod in pod_specs(manifests)
        for one in all_containers(pod)
        for port in one.get("ports", ())
    }
    assert {one["port"] for one in endpoints} == {one for one in ports if one.startswith("metrics")}
    (gateways,) = (one for one in endpoints if one["port"] == "metrics-gw")
    assert gateways["metricRelabelings"] == [{"sourceLabels": ["engine"], "regex": ".+", "action": "drop"}]
    policy = next(one for one in manifests if one["kind"] == "NetworkPolicy")
    opened = [port for rule in policy["spec"]["ingress"] for port in rule.get("ports", ())]
    for number in (9400, 9401, 9411, 9412):
        assert any(one["port"] <= number <= one.get("endPort", one["port"]) for one in opened), number


@pytest.mark.parametrize("name", SHAPES)
def test_kustomize_bases_are_the_chart_rendered(name: str) -> None:
    """`make chart` writes them; a change of the chart shows in them."""
    directory = KUSTOMIZE / name
    for manifest in render(shape_values(name)):
        check_manifest(manifest, OLDEST)
    assert (directory / "moebius.yaml").read_text() == base_text(name), "run `make chart`"
    assert (directory / "kustomization.yaml").read_text() == kustomization_text(name), "run `make chart`"


def test_kustomize_reads_its_bases() -> None:
    """kustomize finds as many objects as are in the file."""
    try:
        text = kubectl_kustomize(KUSTOMIZE / "cpu-two-nodes")
    except FileNotFoundError:
        pytest.skip("kubectl is not installed")
    found = list(yaml.safe_load_all(text))
    written = list(yaml.safe_load_all((KUSTOMIZE / "cpu-two-nodes" / "moebius.yaml").read_text()))
    assert sorted(one["kind"] for one in found) == sorted(one["kind"] for one in written)


def test_the_schema_knows_every_setting() -> None:
    """It is generated from moebius/config/__init__.py."""
    assert json.loads(SCHEMA.read_text()) == schema_with_settings(), "run `make chart`"


@pytest.mark.parametrize("name", SHAPES)
def test_the_real_helm_agrees(name: str, tmp_path: Path) -> None:
    """`helm lint --strict` finds nothing, and `helm template` renders what the library does."""
    helm = helm_cli()
    if helm is None:
        pytest.skip("no helm: `make helm` fetches it")
    values = ["--values", str(SHAPES[name])]
    lint = subprocess.run(
        [helm, "lint", "--strict", CHART, *values], capture_output=True, text=True, timeout=60
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr
    command = [helm, "template", "moebius", CHART, "--namespace", "moebius", *values]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(shown) if one}
    assert found == {(one["kind"], one["metadata"]["name"]): one for one in render(shape_values(name))}


def test_the_real_helm_says_why(tmp_path: Path) -> None:
    """The sentence is what a user reads."""
    helm = helm_cli()
    if helm is None:
        pytest.skip("no helm: `make helm` fetches it")
    command = [helm, "template", "x", CHART, "--set", "model.source.pvc.claimName=m,experts.mode=none"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    assert "experts.mode is none, which puts all experts on GPUs, but engine.gpus is 0" in refused.stderr
