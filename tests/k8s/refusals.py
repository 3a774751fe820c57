"""Values that the chart does not take, each with what its sentence says."""

from __future__ import annotations

from typing import Any

from tests.helpers.chart import Values
from tests.k8s.odd_values import ODD
from tests.k8s.traffic_refusals import TRAFFIC

NO_CLAIM: Values = {"claimName": ""}


def download(**values: Any) -> Values:
    """Returns a model whose files are downloaded with these values."""
    return {"model": {"source": {"type": "download", "pvc": NO_CLAIM, "download": values}}}


REFUSED: list[tuple[Values, str]] = [
    (
        {"engine": {"gpus": 4, "tensorParallel": 3}},
        "are 3 ranks, but engine.gpus 4 × engine.nodes 1 are 4 GPUs",
    ),
    ({"engine": {"tensorParallel": 2}}, "engine.gpus is 0; without GPUs an engine is one process"),
    ({"engine": {"nodes": 2}}, "only GPUs are divided over nodes"),
    ({"engine": {"gpus": 9}}, "maximum"),
    ({"engine": {"cpus": 2.5}}, "integer"),
    ({"engine": {"gpus": 1, "jitCache": {"type": "pvc"}}}, "engine.jitCache.claimName is empty"),
    ({"gateway": {"batches": {"type": "pvc"}}}, "gateway.batches.claimName is empty"),
    ({"gateway": {"batches": {"type": "hostPath"}}}, "batches"),
    (
        {"gateway": {"replicas": 2, "batches": {"type": "pvc", "claimName": "b"}}},
        "a client would not find its files",
    ),
    (
        {"replicas": 3, "gateway": {"inPod": True, "batches": {"type": "emptyDir"}}},
        "which one gateway has for itself, but there may be 3",
    ),
    (
        {
            "gateway": {
                "batches": {"type": "emptyDir"},
                "autoscaling": {"type": "hpa", "maxReplicas": 5},
            }
        },
        "there may be 5",
    ),
    (
        {"gateway": {"batches": {"type": "emptyDir"}}, "config": {"gateway": {"batch_dir": "/b"}}},
        "config.gateway.batch_dir is decided by the chart",
    ),
    ({"experts": {"mode": "none"}}, "puts all experts on GPUs, but engine.gpus is 0"),
    ({"experts": {"servers": 9}}, "a Pod has at most 8 expert servers"),
    ({"experts": {"servers": 2, "shares": [1, 2, 3]}}, "experts.shares has 3 numbers, but there are 2"),
    (
        {"experts": {"servers": 2, "overrides": [{}]}},
        "experts.overrides has 1 entries, but experts.servers is 2",
    ),
    (
        {"experts": {"mode": "remote", "overrides": [{}, {}]}},
        "remote servers are the replicas of one StatefulSet",
    ),
    (
        {"experts": {"memoryMiB": 4096, "weightsMiB": 4000}},
        "memoryMiB 4096 for weightsMiB 4000 of packed experts",
    ),
    ({"experts": {"weights": {"volume": "hostPath"}}}, "experts.weights.hostPath is empty"),
    ({"experts": {"weightsMiB": 333, "weights": {"volume": "hugepages-2Mi"}}}, "no number of 2 MiB pages"),
    (
        {"experts": {"mode": "remote"}, "config": {"gpu": {"prefill_experts": "stream"}}},
        "GPUs can only stream experts that lie in memory of their own Pod",
    ),
    (
        {"engine": {"gpus": 1}, "experts": {"mode": "none"}, "config": {"placement": {"gpu_experts": 3}}},
        "gpu_experts do not fit that",
    ),
    ({"config": {"experts": {"split_count": 3}}}, "config.experts.split_count is decided by the chart"),
    ({"config": {"gpu": {"max_num_sequences": 3}}}, "max_num_sequences"),
    ({"config": {"gpu": {"max_num_seqs": 0}}}, "max_num_seqs"),
    ({"exprets": {}}, "exprets"),
    (
        {"experts": {"servers": 3, "numa": "kubelet"}, "node": {"numaNodes": 2}},
        "every server needs a NUMA node",
    ),
    (
        {"experts": {"cpus": 40}, "node": {"cpusPerNumaNode": 32}},
        "wants 40 CPUs, but node.cpusPerNumaNode is 32",
    ),
    (
        {"experts": {"cpus": 16, "numa": "kubelet"}, "node": {"cpusPerNumaNode": 32}},
        "two servers would fit on one; with experts.numa kubelet each needs more than half",
    ),
    ({"node": {"memoryMiBPerNumaNode": 2048}}, "but node.memoryMiBPerNumaNode is 2048"),
    ({"experts": {"cpus": 5}, "node": {"threadsPerCore": 2}}, "full-pcpus-only refuses that"),
    ({"engine": {"cpus": 3}, "node": {"threadsPerCore": 2}}, "engine.cpus is 3, which are no whole cores"),
    (
        {"node": {"topologyPolicy": "single-numa-node", "topologyScope": "pod"}},
        "puts a whole Pod on one NUMA node, which cannot hold 2 expert servers",
    ),
    (
        {"engine": {"gpus": 8}, "node": {"gpusPerNumaNode": 4, "topologyPolicy": "single-numa-node"}},
        "would refuse the engine's container for ever; allowed: restricted",
    ),
    (
        {"experts": {"numa": "kubelet"}, "node": {"topologyPolicy": "best-effort"}},
        "best-effort does not promise CPUs of one NUMA node",
    ),
    ({"dra": {"enabled": True}}, "which experts.numa auto does not ask for"),
    ({"model": {"source": {"type": "pvc", "pvc": {"claimName": ""}}}}, "model.source.pvc.claimName is empty"),
    ({"model": {"source": {"type": "hostPath", "pvc": NO_CLAIM}}}, "model.source.hostPath.path is empty"),
    ({"model": {"source": {"type": "image", "pvc": NO_CLAIM}}}, "model.source.image.reference is empty"),
    (
        {"model": {"source": {"type": "download", "pvc": NO_CLAIM}}},
        "model.source.download.repository and baseUrl are empty",
    ),
    (download(baseUrl="https://a/b"), "names no file; each needs its SHA-256"),
    (download(baseUrl="https://a/b", repository="a/b"), "are both set; the files come from one place"),
    (download(repository="a/b", files={"x": "0" * 64}), "the hub says which files"),
    (download(baseUrl="https://a/b", revision="v1"), "revisions are the hub's"),
    (download(repository="a/b", claimName="c", hostPath="/c"), "the files are kept in one place"),
    (
        {"model": {"source": {"type": "download", "download": {"files": {"../x": "0" * 64}}}}},
        "propertyName '../x'",
    ),
    ({"model": {"source": {"type": "s3"}}}, "type"),
    (
        {"gateway": {"inPod": True, "autoscaling": {"type": "hpa"}}},
        "with gateway.inPod there are as many gateways as engine Pods",
    ),
    (
        {"gateway": {"autoscaling": {"type": "hpa", "minReplicas": 5, "maxReplicas": 2}}},
        "gateway.autoscaling.minReplicas is 5, above gateway.autoscaling.maxReplicas 2",
    ),
    ({"autoscaling": {"type": "keda"}}, "autoscaling.prometheusAddress is empty"),
    (
        {"autoscaling": {"type": "keda", "minReplicas": 0, "prometheusAddress": "http://p"}},
        "autoscaling.minReplicas is 0, but nothing would start the first engine again",
    ),
    ({"config": {"gateway": {"engines": ["a:1"]}}}, "config.gateway.engines is decided by the chart"),
    (
        {"config": {"experts": {"expert_addresses": ["a:1"]}}},
        "config.experts.expert_addresses is decided by the chart",
    ),
    (
        {"experts": {"nodeSelector": {"a": "b"}}},
        "experts.nodeSelector is for experts.mode remote; with pod expert servers run where "
        "engine.nodeSelector puts their engine",
    ),
    (
        {"gateway": {"inPod": True, "tolerations": []}},
        "gateway.tolerations is for a gateway that is a Deployment of its own",
    ),
    ({"route": {"enabled": True}}, "route.parentRefs names no Gateway"),
    ({"route": {"inferencePool": {"enabled": True}}}, "route.enabled is false"),
    (
        {"route": {"enabled": True, "parentRefs": [{"name": "g"}], "inferencePool": {"enabled": True}}},
        "which engine Pods do with gateway.inPod only",
    ),
    (
        {"tls": {"grpc": {"secretName": "s"}}},
        "tls.grpc.secretName is set, but tls.grpc.mode is none, which is plain text; allowed: tls, mutual",
    ),
    ({"tls": {"grpc": {"serverName": "s"}}}, "tls.grpc.serverName is set, but tls.grpc.mode is none"),
    (
        {"tls": {"grpc": {"mode": "mutual"}}},
        "tls.grpc.mode is mutual, but tls.grpc.secretName names no Secret",
    ),
    ({"tls": {"grpc": {"mode": "off"}}}, "mode"),
    ({"tls": {"grpc": {"mode": "mutual", "secretName": "Not a name"}}}, "secretName"),
    (
        {
            "gateway": {"inPod": True},
            "tls": {"grpc": {"mode": "mutual", "secretName": "s", "gatewaySecretName": "g"}},
        },
        "with gateway.inPod it shares its Pod's tls.grpc.secretName",
    ),
    (
        {"tls": {"grpc": {"mode": "mutual", "secretName": "s", "expertsSecretName": "e"}}},
        "tls.grpc.expertsSecretName is for experts.mode remote; with pod expert servers share",
    ),
    (
        {"tls": {"http": {"clientCaSecretName": "c"}}},
        "tls.http.secretName is empty, so that the gateway speaks",
    ),
    (
        {"route": {"enabled": True, "parentRefs": [{"name": "g"}]}, "tls": {"http": {"secretName": "s"}}},
        "route.backendCaConfigMap names no ConfigMap with the CA",
    ),
    ({"route": {"backendCaConfigMap": "ca"}}, "tls.http.secretName is empty"),
    (
        {
            "gateway": {"inPod": True},
            "route": {
                "enabled": True,
                "parentRefs": [{"name": "g"}],
                "backendCaConfigMap": "ca",
                "inferencePool": {"enabled": True, "endpointPicker": {"name": "p"}},
            },
            "tls": {"http": {"secretName": "s"}},
        },
        "route.inferencePool sends plain HTTP to its Pods",
    ),
    (
        {"tls": {"http": {"secretName": "s"}, "certManager": {"enabled": True}}},
        "tls.certManager.issuer.name is empty",
    ),
    (
        {"tls": {"certManager": {"enabled": True, "issuer": {"name": "ca"}}}},
        "neither tls.grpc.secretName nor tls.http.secretName names a Secret for it to write",
    ),
    (
        {
            "tls": {
                "http": {"secretName": "s"},
                "certManager": {"enabled": True, "issuer": {"name": "ca"}, "duration": "24h"},
            }
        },
        "tls.certManager.renewBefore is 720h, which is not less than tls.certManager.duration 24h",
    ),
    (
        {"tls": {"http": {"secretName": "s"}}, "config": {"security": {"http_cert_file": "/x"}}},
        "config.security.http_cert_file is decided by the chart",
    ),
    *TRAFFIC,
    *ODD,
]
