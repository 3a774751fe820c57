"""Names that Pods of rendered manifests have in a cluster's DNS.

Kubernetes: a Pod with a subdomain is found as `POD.SUBDOMAIN.NAMESPACE.svc` by a headless Service of that
name that selects it. LeaderWorkerSet, by its sources (main of August 2026: pkg/controllers and
pkg/utils/controller/controller_utils.go): group G's leader is the Pod `NAME-G` and its workers are
`NAME-G-1`, `NAME-G-2`, ..., all with the subdomain NAME; a headless Service NAME is made for them, also for
Pods that are not ready, unless there is a Service of that name. LWS_LEADER_ADDRESS is
`NAME-G.NAME.NAMESPACE`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.helpers.chart import Manifest

_LWS = "leaderworkerset.sigs.k8s.io"


@dataclass(frozen=True)
class Pod:
    """One Pod; filled by `pods_of`."""

    name: str
    subdomain: str
    labels: dict[str, str]
    # What kubelets and controllers put in the place of `$(NAME)` in arguments.
    values: dict[str, str]
    spec: dict[str, Any]

    def arguments(self) -> Iterator[str]:
        """Yields the arguments of all containers."""
        for container in (*(self.spec.get("initContainers") or ()), *self.spec["containers"]):
            for word in container.get("args", ()):
                text = str(word)
                for name, value in self.values.items():
                    text = text.replace(f"$({name})", value)
                yield text

    def ports(self) -> set[int]:
        """Open ones."""
        containers = (*(self.spec.get("initContainers") or ()), *self.spec["containers"])
        return {port["containerPort"] for one in containers for port in one.get("ports", ())}


def pods_of(manifests: list[Manifest], namespace: str, groups: int = 2) -> list[Pod]:
    """Returns pods with `groups` replicas of everything that was given no number."""
    found = []
    for manifest in manifests:
        spec, name = manifest.get("spec", {}), manifest["metadata"]["name"]
        count = spec.get("replicas") or groups
        if manifest["kind"] in ("StatefulSet", "Deployment"):
            for index in range(count):
                found.append(
                    _pod(f"{name}-{index}", spec.get("serviceName", ""), spec["template"], namespace)
                )
        elif manifest["kind"] == "LeaderWorkerSet":
            for group in range(groups):
                found += _group(name, group, spec["leaderWorkerTemplate"], namespace)
    return found


def _group(name: str, group: int, template: dict[str, Any], namespace: str) -> Iterator[Pod]:
    values = {"GROUP_INDEX": str(group), "LWS_LEADER_ADDRESS": f"{name}-{group}.{name}.{namespace}"}
    for worker in range(template["size"]):
        labels = {
            f"{_LWS}/name": name,
            f"{_LWS}/group-index": str(group),
            f"{_LWS}/worker-index": str(worker),
        }
        role = "workerTemplate" if worker else "leaderTemplate"
        pod = f"{name}-{group}-{worker}" if worker else f"{name}-{group}"
        yield _pod(pod, name, template[role], namespace, labels, {**values, "LWS_WORKER_INDEX": str(worker)})


def _pod(
    name: str,
    subdomain: str,
    template: dict[str, Any],
    namespace: str,
    labels: dict[str, str] | None = None,
    values: dict[str, str] | None = None,
) -> Pod:
    own = {"POD_NAME": name, "POD_NAMESPACE": namespace, **(values or {})}
    return Pod(name, subdomain, {**template["metadata"]["labels"], **(labels or {})}, own, template["spec"])


def services_of(manifests: list[Manifest]) -> dict[str, dict[str, Any]]:
    """Returns name -> specification, of those that are rendered and those that LeaderWorkerSets make."""
    found = {one["metadata"]["name"]: one["spec"] for one in manifests if one["kind"] == "Service"}
    for one in manifests:
        name = one["metadata"]["name"]
        if one["kind"] == "LeaderWorkerSet" and name not in found:
            found[name] = {"clusterIP": "None", "selector": {f"{_LWS}/name": name}}
    return found


def resolve(host: str, manifests: list[Manifest], namespace: str) -> list[Pod]:
    """Returns pods whose addresses a name has there; none: it does not resolve."""
    parts = host.removesuffix(".svc").split(".")
    assert parts[-1] == namespace, host
    pods, services = pods_of(manifests, namespace), services_of(manifests)
    service = services.get(parts[-2])
    if service is None:
        return []
    selected = [pod for pod in pods if service["selector"].items() <= pod.labels.items()]
    if len(parts) == 2:
        return selected
    headless = service.get("clusterIP") == "None"
    return [pod for pod in selected if headless and (pod.name, pod.subdomain) == (parts[0], parts[1])]
