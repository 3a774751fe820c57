"""Rollouts, routes and claims that could not work, each with what its sentence says."""

from __future__ import annotations

from tests.helpers.chart import Values

GATEWAY: Values = {"enabled": True, "parentRefs": [{"name": "g"}]}
ONCE: Values = {"model": {"source": {"pvc": {"accessMode": "ReadWriteOnce"}}}}

TRAFFIC: list[tuple[Values, str]] = [
    ({"rollout": {"maxSurge": 1}}, "rollout.maxSurge is 1, but the StatefulSet of engine.nodes 1"),
    (
        {"engine": {"gpus": 1, "nodes": 2}, "rollout": {"maxUnavailable": 0}},
        "are both 0, so that no engine could be replaced",
    ),
    ({"rollout": {"partition": 2}}, "rollout.partition is 2, but replicas is 1"),
    (
        {"route": {**GATEWAY, "weight": 0, "others": [{"name": "b", "weight": 0}]}},
        "are 0, so that every request would be refused",
    ),
    (
        {"route": {**GATEWAY, "others": [{"name": "moebius", "weight": 1}]}},
        "route.others names moebius, which is this release's own Service",
    ),
    (
        {"route": {**GATEWAY, "others": [{"kind": "InferencePool", "name": "b", "port": 80, "weight": 1}]}},
        "b is an InferencePool, which has ports of its own",
    ),
    ({"route": {**GATEWAY, "others": [{"name": "b"}]}}, "/route/others/0"),
    ({"route": {"others": [{"name": "b", "weight": 1}]}}, "route.others is set, but route.enabled is false"),
    (
        {"ingress": {"enabled": True, "tlsSecretName": "s"}},
        "ingress.tlsSecretName is set, but ingress.hosts is empty",
    ),
    ({"ingress": {"hosts": ["m.example.com"]}}, "ingress.hosts is set, but ingress.enabled is false"),
    (
        {"ingress": {"enabled": True}, "tls": {"http": {"secretName": "s"}}},
        "does not tell the controller to speak HTTPS",
    ),
    ({"helmTest": {"clientSecretName": "s"}}, "tls.http.clientCaSecretName is empty"),
    (
        {**ONCE, "replicas": 2},
        "model.source.pvc.accessMode is ReadWriteOnce, which one node mounts, but engines may be on 2 nodes",
    ),
    (
        {**ONCE, "experts": {"mode": "remote"}},
        "but expert servers of experts.mode remote are on other nodes",
    ),
    (
        {**ONCE, "gateway": {"affinity": {"podAffinity": {}}}},
        "the gateway has to be on the engine's node",
    ),
    (
        {
            "replicas": 3,
            "engine": {
                "gpus": 1,
                "jitCache": {"type": "pvc", "claimName": "c", "accessMode": "ReadWriteOnce"},
            },
        },
        "engines may be on 3 nodes; allowed: ReadWriteMany, or type perPod",
    ),
    (
        {"autoscaling": {"type": "hpa", "minReplicas": 0}},
        "autoscaling.minReplicas is 0, but nothing would start the first engine again",
    ),
]
