"""Values of the right type that no cluster takes, or that would do nothing, each with its sentence."""

from __future__ import annotations

from tests.helpers.chart import Values

ODD: list[tuple[Values, str]] = [
    ({"fullnameOverride": "1model"}, 'full name is "1model", but Services need one'),
    ({"nameOverride": "Not A Name"}, 'full name is "moebius-Not A Name"'),
    (
        {"model": {"source": {"pvc": {"claimName": "My_Claim"}}}},
        'model.source.pvc.claimName is "My_Claim", which is no name of an object',
    ),
    ({"gateway": {"apiKeySecret": "keys/a"}}, 'gateway.apiKeySecret is "keys/a", which is no name'),
    ({"gateway": {"priorityClassName": "High"}}, 'gateway.priorityClassName is "High"'),
    ({"serviceAccount": {"name": "a b"}}, 'serviceAccount.name is "a b"'),
    ({"image": {"tag": "a b"}}, "/image/tag"),
    ({"image": {"repository": "https://registry/moebius"}}, "/image/repository"),
    ({"image": {"pullSecrets": [{"name": ""}]}}, "image.pullSecrets has an entry whose name is empty"),
    ({"engine": {"gpuResource": "gpu"}}, "allowed: DOMAIN/NAME, as nvidia.com/gpu"),
    ({"model": {"path": "../other"}}, "which leaves its source"),
    (
        {"route": {"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["https://m.example.com"]}},
        'route.hostnames has "https://m.example.com", which is no host name',
    ),
    (
        {"autoscaling": {"type": "keda", "prometheusAddress": "prometheus:9090"}},
        "allowed: a URL, as http://prometheus.monitoring.svc:9090",
    ),
    ({"monitoring": {"otlpEndpoint": "http://collector:4317/v1/traces"}}, "a URL without a path"),
    ({"monitoring": {"interval": "0s"}}, "/monitoring/interval"),
    ({"podDisruptionBudget": {"maxUnavailable": "150%"}}, "/podDisruptionBudget/maxUnavailable"),
    ({"tls": {"certManager": {"duration": "0h"}}}, "/tls/certManager/duration"),
    ({"tolerations": ["gpu"]}, "/tolerations/0"),
    ({"tolerations": [{"key": "gpu", "operator": "exists"}]}, "/tolerations/0/operator"),
    ({"affinity": {"nodeAfinity": {}}}, "nodeAfinity"),
    ({"engine": {"topologySpreadConstraints": [{"topologyKey": "zone"}]}}, "maxSkew"),
    ({"startupSeconds": 100_000_000}, "/startupSeconds"),
    ({"extraEnv": [{"value": "x"}]}, "/extraEnv/0"),
    ({"extraEnv": [{"name": "HOME", "value": "/x"}]}, "extraEnv has HOME, which the chart sets"),
    ({"extraVolumes": [{"name": "shm", "emptyDir": {}}]}, 'extraVolumes has "shm"'),
    (
        {"extraVolumeMounts": [{"name": "nothing", "mountPath": "/x"}]},
        'extraVolumeMounts has "nothing", which no volume is called',
    ),
    (
        {"extraVolumeMounts": [{"name": "tmp", "mountPath": "/models"}]},
        "mountPath /models, where the chart mounts a volume",
    ),
    ({"podLabels": {"app.kubernetes.io/component": "x"}}, "by which the chart's Services find their Pods"),
    (
        {"experts": {"weights": {"hostPath": "/mnt"}}},
        "experts.weights.hostPath is set, but experts.weights.volume is memory: it would do nothing",
    ),
    (
        {"engine": {"jitCache": {"claimName": "c"}}},
        "engine.jitCache.claimName is set, but engine.jitCache.type is emptyDir",
    ),
    (
        {"gateway": {"batches": {"claimName": "c"}}},
        "gateway.batches.claimName is set, but gateway.batches.type is none",
    ),
    (
        {"model": {"source": {"hostPath": {"path": "/m"}}}},
        "model.source.hostPath.path is set, but model.source.type is pvc",
    ),
    ({"route": {"hostnames": ["m.example.com"]}}, "route.hostnames is set, but route.enabled is false"),
    (
        {"networkPolicy": {"from": [{"podSelector": {}}]}},
        "networkPolicy.from is set, but networkPolicy.enabled is false",
    ),
    (
        {"engine": {"gpus": 1}, "experts": {"mode": "none", "shares": [1]}},
        "experts.shares is set, but experts.mode is none",
    ),
    ({"gateway": {"inPod": True, "replicas": 3}}, "gateway.replicas is 3, but with gateway.inPod"),
]
