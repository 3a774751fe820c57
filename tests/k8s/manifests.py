"""Strict checks of manifests: the schemas of Kubernetes itself, and our own of the custom resources we use.

Where the projects' own definitions were fetched (`make crds`), these are used, too.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from tests.helpers.chart import ROOT, Manifest

NEWEST, OLDEST = "1.37", "1.34"
# The checker only warns of kinds that it does not know.
BUILTIN = {
    "ConfigMap",
    "Deployment",
    "HorizontalPodAutoscaler",
    "Ingress",
    "Job",
    "NetworkPolicy",
    "Pod",
    "PodDisruptionBudget",
    "ResourceClaimTemplate",
    "Service",
    "ServiceAccount",
    "StatefulSet",
}
CRDS = ROOT / "build" / "crds"


def obj(required: str = "", **fields: Any) -> dict[str, Any]:
    """Returns an object with these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


TEXT, NUMBER, TEXTS = {"type": "string"}, {"type": "integer"}, {"additionalProperties": {"type": "string"}}


def items(schema: dict[str, Any]) -> dict[str, Any]:
    """At least one."""
    return {"type": "array", "items": schema, "minItems": 1}


POD_TEMPLATE = obj("metadata spec", metadata=obj(labels=TEXTS, annotations=TEXTS), spec={"type": "object"})
ENDPOINT = obj(
    "port",
    port=TEXT,
    interval=TEXT,
    path=TEXT,
    relabelings={"type": "array"},
    metricRelabelings=items(obj("action", sourceLabels=items(TEXT), regex=TEXT, action={"enum": ["drop"]})),
    filterRunning={"type": "boolean"},
)
RULE = obj("expr", alert=TEXT, record=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS, **{"for": TEXT})
SCALING_RULES = obj(
    stabilizationWindowSeconds=NUMBER,
    policies=items(
        obj(
            "type value periodSeconds",
            type={"enum": ["Pods", "Percent"]},
            value=NUMBER,
            periodSeconds=NUMBER,
        )
    ),
)
# Of `spec`, what the chart uses.
CUSTOM: dict[tuple[str, str], dict[str, Any]] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): obj(
        "leaderWorkerTemplate",
        replicas=NUMBER,
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        rolloutStrategy=obj(
            "type",
            type={"const": "RollingUpdate"},
            rollingUpdateConfiguration=obj(partition=NUMBER, maxUnavailable=NUMBER, maxSurge=NUMBER),
        ),
        leaderWorkerTemplate=obj(
            "workerTemplate",
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
            leaderTemplate=POD_TEMPLATE,
            workerTemplate=POD_TEMPLATE,
            volumeClaimTemplates=items({"type": "object"}),
        ),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): obj(
        "parentRefs rules",
        parentRefs=items(obj("name", name=TEXT, namespace=TEXT, sectionName=TEXT, port=NUMBER)),
        hostnames=items(TEXT),
        rules=items(
            obj(
                matches=items(
                    obj(path=obj("type value", type={"enum": ["PathPrefix", "Exact"]}, value=TEXT))
                ),
                timeouts=obj(request=TEXT, backendRequest=TEXT),
                backendRefs=items(obj("name", group=TEXT, kind=TEXT, name=TEXT, port=NUMBER, weight=NUMBER)),
            )
        ),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): obj(
        "selector targetPorts endpointPickerRef",
        selector=obj("matchLabels", matchLabels=TEXTS),
        targetPorts=items(obj("number", number=NUMBER)),
        endpointPickerRef=obj(
            "name",
            name=TEXT,
            port=obj("number", number=NUMBER),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
    ("gateway.networking.k8s.io/v1", "BackendTLSPolicy"): obj(
        "targetRefs validation",
        targetRefs=items(obj("group kind name", group=TEXT, kind=TEXT, name=TEXT, sectionName=TEXT)),
        validation=obj(
            "hostname caCertificateRefs",
            hostname=TEXT,
            caCertificateRefs=items(
                obj("group kind name", group=TEXT, kind={"const": "ConfigMap"}, name=TEXT)
            ),
        ),
    ),
    ("cert-manager.io/v1", "Certificate"): obj(
        "secretName issuerRef dnsNames",
        secretName={"type": "string", "minLength": 1},
        duration=TEXT,
        renewBefore=TEXT,
        privateKey=obj(
            algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
            size=NUMBER,
            rotationPolicy={"enum": ["Never", "Always"]},
        ),
        usages=items({"enum": ["digital signature", "key encipherment", "server auth", "client auth"]}),
        dnsNames=items(TEXT),
        ipAddresses=items(TEXT),
        issuerRef=obj("name", name=TEXT, kind=TEXT, group=TEXT),
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): obj(
        "selector podMetricsEndpoints",
        selector=obj("matchLabels", matchLabels=TEXTS),
        podMetricsEndpoints=items(ENDPOINT),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): obj(
        "groups", groups=items(obj("name rules", name=TEXT, rules=items(RULE)))
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): obj(
        "scaleTargetRef triggers",
        scaleTargetRef=obj("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=NUMBER,
        maxReplicaCount=NUMBER,
        cooldownPeriod=NUMBER,
        advanced=obj(
            horizontalPodAutoscalerConfig=obj(behavior=obj(scaleUp=SCALING_RULES, scaleDown=SCALING_RULES))
        ),
        triggers=items(obj("type metadata", type=TEXT, metadata=TEXTS)),
    ),
}


def strict(schema: Any) -> Any:
    """A CRD's schema, in which fields that it does not know are errors, as `kubectl apply` warns of them."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items() if not key.startswith("x-kubernetes")}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    if isinstance(found.get("pattern"), str) and "(?i)" in found["pattern"][1:]:
        found.pop("pattern")  # Go's; Python allows flags at the begin only
    if "properties" in found and not schema.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


@cache
def fetched(kind: str, version: str) -> dict[str, Any] | None:
    """The project's own schema; None: not fetched."""
    path: Path = CRDS / f"{kind}.yaml"
    if not path.exists():
        return None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    versions = yaml.load(path.read_text(), Loader=loader)["spec"]["versions"]
    schema = next(one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == version)
    schema["properties"]["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    checked: dict[str, Any] = strict(schema)
    return checked


def check_manifest(manifest: Manifest, version: str = NEWEST) -> None:
    """Raises AssertionError or jsonschema's error for what an API server would refuse or ignore."""
    kind = (manifest["apiVersion"], manifest["kind"])
    assert set(manifest) <= {
        "apiVersion",
        "kind",
        "metadata",
        "spec",
        "data",
        "automountServiceAccountToken",
    }, kind
    if kind not in CUSTOM:
        _check_builtin(manifest, version)
        return
    jsonschema.validate(manifest["spec"], CUSTOM[kind])
    full = fetched(manifest["kind"], manifest["apiVersion"].rpartition("/")[2])
    if full is not None:
        jsonschema.validate(manifest, full)
    for template in manifest["spec"].get("leaderWorkerTemplate", {}).values():
        if isinstance(template, dict):
            _check_builtin({"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}, version)


def _check_builtin(manifest: Manifest, version: str) -> None:
    assert manifest["kind"] in BUILTIN, f"no schema of {manifest['apiVersion']} {manifest['kind']}"
    _checker().validate(manifest, version, strict=True)


@cache
def _checker() -> Any:
    """kubernetes_validate, which by itself reads megabytes of schemas again for every object."""
    import kubernetes_validate.utils

    kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)
    return kubernetes_validate


def pod_specs(manifests: list[Manifest]) -> list[Manifest]:
    """Returns pod templates, `{metadata, spec}`, and Pods, which are these, too."""
    found = []
    for manifest in manifests:
        spec = manifest.get("spec", {})
        templates = spec.get("leaderWorkerTemplate", {"template": spec.get("template")})
        found += [one for one in templates.values() if isinstance(one, dict) and "spec" in one]
    return found + [manifest for manifest in manifests if manifest["kind"] == "Pod"]
