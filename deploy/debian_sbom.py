"""Adds the packages of a Debian or Ubuntu system to a CycloneDX document: `debian_sbom.py FILE [ROOT]`.

Runs with the system's own Python and no other package, in the image that it lists. Names follow the package
URL specification, type deb: https://github.com/package-url/purl-spec.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote


def read_release(root: Path) -> dict[str, str]:
    """Returns the assignments of /etc/os-release."""
    lines = (root / "etc/os-release").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("=", 1) for line in lines if "=" in line)
    return {name: value.strip("\"'") for name, value in pairs}


def read_packages(root: Path) -> Iterator[dict[str, str]]:
    """Yields the fields of every installed package, as dpkg's status file has them; of long ones the first
    line."""
    text = (root / "var/lib/dpkg/status").read_text(encoding="utf-8")
    for paragraph in text.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line[:1] not in (" ", "\t")]
        fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if fields.get("Status", "").endswith(" installed"):
            yield fields


def component(package: dict[str, str], release: dict[str, str]) -> dict[str, Any]:
    """Returns the component of one package."""
    name, version = package["Package"], package["Version"]
    system = release["ID"]
    qualifiers = f"arch={package['Architecture']}&distro={system}-{release.get('VERSION_ID', 'unknown')}"
    url = f"pkg:deb/{system}/{quote(name, safe='')}@{quote(version, safe='')}?{qualifiers}"
    found: dict[str, Any] = {"type": "library", "name": name, "version": version, "purl": url, "bom-ref": url}
    if "Maintainer" in package:
        found["supplier"] = {"name": package["Maintainer"]}
    # By the source package advisories name what they are about.
    source = package.get("Source", name)
    found["properties"] = [{"name": "debian:source", "value": source}]
    return found


def add_packages(document: dict[str, Any], root: Path) -> dict[str, Any]:
    """Returns the document with the system's packages after its own, in place of those added before."""
    release = read_release(root)
    own = [each for each in document.get("components", ()) if not each.get("purl", "").startswith("pkg:deb/")]
    found = sorted((component(each, release) for each in read_packages(root)), key=lambda one: one["purl"])
    return {**document, "components": [*own, *found]}


def main(arguments: list[str]) -> None:
    """Rewrites the file."""
    file, root = Path(arguments[0]), Path(arguments[1] if len(arguments) > 1 else "/")
    document = add_packages(json.loads(file.read_text(encoding="utf-8")), root)
    file.write_text(json.dumps(document, indent=2, sort_keys=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
