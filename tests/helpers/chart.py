"""The Helm chart in `k8s/chart`: rendered here, and what is generated of it (`make chart`).

Generated are the settings in the chart's schema of values, from `moebius/config`, and `k8s/kustomize`, the
chart rendered for some shapes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from moebius.config.loader import sections

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "k8s" / "chart"
SCHEMA = CHART / "values.schema.json"
KUSTOMIZE = ROOT / "k8s" / "kustomize"
# Shapes of the kustomize bases, by name: the values in k8s/shapes.
# libyaml's, which comes with PyYAML's wheels, is ten times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SHAPES = {path.stem: path for path in sorted((ROOT / "k8s" / "shapes").glob("*.yaml"))}
Values = dict[str, Any]
Manifest = dict[str, Any]


def schema_with_settings() -> dict[str, Any]:
    """The schema of values, with every setting that `config` may hold."""
    schema: dict[str, Any] = json.loads(SCHEMA.read_text())
    found = {}
    for name, section in sections().items():
        found[name] = section.model_json_schema()
        found[name].pop("title", None)
        found[name].pop("description", None)
        for leaf in found[name]["properties"].values():
            leaf.pop("title", None)
            leaf.pop("default", None)
    schema["properties"]["config"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": found,
    }
    return schema


@cache
def _chart() -> Any:
    from helm_python import Chart

    return Chart.load(str(CHART))


class Refused(Exception):
    """The chart does not take the values; its message is what a user reads."""


def render(values: Values, name: str = "moebius", namespace: str = "moebius") -> list[Manifest]:
    """Returns the manifests of a release, in the order of their files. Raises Refused."""
    from helm_python import HelmError

    try:
        _chart().validate_schema(values)
        files = _chart().render(values, name=name, namespace=namespace)
    except HelmError as error:
        raise Refused(str(error)) from None
    return [
        document
        for path in sorted(files)
        if path.endswith(".yaml")
        for document in yaml.load_all(files[path], _LOADER)
        if document
    ]


def helm_cli() -> str | None:
    """Returns the real `helm`, where there is one: on the path, or fetched by `make helm`."""
    fetched = ROOT / "build" / "helm" / "helm"
    return str(fetched) if fetched.exists() else shutil.which("helm")


def shape_values(name: str) -> Values:
    """Returns the shape values of one shape."""
    values: Values = yaml.safe_load(SHAPES[name].read_text())
    return values


# Stands where a release has its namespace; a base is for any.
NO_NAMESPACE = "namespace-of-the-release"


def base_text(name: str) -> str:
    """Returns a kustomize base's manifests, without what only Helm looks at, and without a namespace.

    Certificates lose the names that have it in them: in bases they are for `tls.grpc.serverName`. Alerts tell
    releases apart by the label that Prometheus adds.
    """
    documents = []
    for document in render(shape_values(name), namespace=NO_NAMESPACE):
        if "helm.sh/hook" in document["metadata"].get("annotations", {}):
            continue  # `helm test` alone creates it
        if document["kind"] == "Certificate":
            names = document["spec"]["dnsNames"]
            document["spec"]["dnsNames"] = [each for each in names if NO_NAMESPACE not in each]
        for rule in _rules(document):
            rule["expr"] = rule["expr"].replace(f'namespace="{NO_NAMESPACE}", ', "")
        labels = document["metadata"]["labels"]
        for label in ("app.kubernetes.io/managed-by", "helm.sh/chart"):
            labels.pop(label, None)
        documents.append(yaml.safe_dump(document, sort_keys=False, width=110))
    return "---\n".join(documents)


def _rules(document: Manifest) -> list[dict[str, Any]]:
    """Returns the alerts of a PrometheusRule."""
    if document["kind"] != "PrometheusRule":
        return []
    return [rule for group in document["spec"]["groups"] for rule in group["rules"]]


def kustomization_text(name: str) -> str:
    """Returns the kustomization text of a base."""
    first = next(
        line.removeprefix("# ") for line in SHAPES[name].read_text().splitlines() if line.startswith("# ")
    )
    return (
        f"# {first}\n# Generated from k8s/shapes/{name}.yaml by `make chart`.\n"
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n  - moebius.yaml\n"
    )


def generate() -> None:
    """Writes what is generated."""
    SCHEMA.write_text(json.dumps(schema_with_settings(), indent=1) + "\n")
    _chart.cache_clear()
    for name in SHAPES:
        directory = KUSTOMIZE / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "moebius.yaml").write_text(base_text(name))
        (directory / "kustomization.yaml").write_text(kustomization_text(name))


def kubectl_kustomize(directory: Path) -> str:
    """Returns what `kubectl kustomize` makes of a directory, without a cluster."""
    command = ["kubectl", "kustomize", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


if __name__ == "__main__":
    generate()
