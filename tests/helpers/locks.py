"""What deploy/locks holds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "deploy" / "locks"
# What is installed together: developers without and with a GPU, both images, and what builds them.
SETS = {
    "developer": ("serve", "dev", "cpu"),
    "developer with a GPU": ("serve", "dev", "cuda"),
    "CPU image": ("serve",),
    "CUDA image": ("serve", "cuda", "gpu"),
    "building": ("build",),
}


def project() -> dict[str, Any]:
    """pyproject.toml's."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def pythons() -> list[str]:
    """Returns the supported versions."""
    names = (
        re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", one) for one in project()["classifiers"]
    )
    return [name[1] for name in names if name]


def asked_for(python: str, is_building: bool) -> dict[str, set[str]]:
    """Returns package -> who asks for it, by the files' comments; `pyproject.toml` for ourselves.

    What builds is resolved apart from the rest.
    """
    found: dict[str, set[str]] = {}
    for path in (LOCKS / f"python{python}").iterdir():
        if (path.stem == "build") != is_building:
            continue
        blocks = re.split(r"^(?=[a-z0-9])", path.read_text(), flags=re.MULTILINE)
        for block in blocks:
            via = re.search(r"# via (.*)$", block, re.MULTILINE)
            if via:
                found.setdefault(block.partition("==")[0], set()).update(via[1].split(", "))
    return found


def locked(python: str, *kinds: str) -> dict[str, str]:
    """Returns name -> version. Raises AssertionError for a package that two of the files have."""
    found: dict[str, str] = {}
    for kind in kinds:
        text = (LOCKS / f"python{python}" / f"{kind}.txt").read_text()
        for name, version in re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE):
            assert name not in found, f"{name} is in two files of {kinds}"
            found[name] = version
    return found
