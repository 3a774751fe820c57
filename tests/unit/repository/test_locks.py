"""Guards deploy/locks: complete for each supported Python, with hashes, and from no named place."""

from __future__ import annotations

import re
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers.locks import LOCKS, SETS, asked_for, locked, project, pythons

KINDS = ("serve", "dev", "cpu", "cuda", "gpu", "build")


def wanted(name: str) -> list[Requirement]:
    """Returns what pyproject.toml asks for in a set."""
    extras = project()["optional-dependencies"]
    texts = {
        "developer": [*project()["dependencies"], *extras["vision"], *extras["dev"]],
        "CPU image": [*project()["dependencies"], *extras["vision"]],
        "CUDA image": [*project()["dependencies"], *extras["vision"], *extras["gpu"]],
        "building": ["scikit-build-core", "pybind11", "cmake", "ninja", "cyclonedx-bom"],
    }
    texts["developer with a GPU"] = texts["developer"]
    return [Requirement(text) for text in texts[name]]


def test_each_python_has_its_files() -> None:
    """Those of pyproject.toml's classifiers, and no other; all is installed by hash, from anywhere."""
    assert {path.name.removeprefix("python") for path in LOCKS.iterdir()} == set(pythons())
    for python in pythons():
        files = sorted((LOCKS / f"python{python}").iterdir())
        assert {path.stem for path in files} == set(KINDS)
        for path in files:
            text = path.read_text()
            assert "//" not in text, path
            lines = [line for line in text.splitlines() if not line.startswith("#")]
            lines = [line for line in lines if not line.startswith("    # via ")]
            packages = "\n".join(lines).replace(" \\\n    ", " ").splitlines()
            for line in packages:
                assert re.fullmatch(r"[a-z0-9-]+==[\w.!+]+( --hash=sha256:[0-9a-f]{64})+", line), (path, line)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("python", pythons())
def test_every_requirement_is_locked_within_its_range(python: str, name: str) -> None:
    """`make lock` was run after the last change of pyproject.toml. torch's CPU build has no hash to lock."""
    versions = locked(python, *SETS[name])
    assert ("torch" in versions) == ("cuda" in SETS[name])
    versions.setdefault("torch", locked(python, "cuda")["torch"])
    for requirement in wanted(name):
        found = versions.get(canonicalize_name(requirement.name))
        assert found is not None, f"{requirement.name}: run `make lock`"
        assert requirement.specifier.contains(found, prereleases=True), (
            f"{requirement.name} {found}: run `make lock`"
        )


def test_what_runs_is_the_same_everywhere() -> None:
    """Developers test the versions that images have; what builds an image is what builds here."""
    for python in pythons():
        cpu, cuda = locked(python, *SETS["CPU image"]), locked(python, *SETS["CUDA image"])
        assert cpu.items() <= cuda.items()
        assert cpu.items() <= locked(python, *SETS["developer"]).items()
        developers, building = locked(python, *SETS["developer"]), locked(python, *SETS["building"])
        for package in ("scikit-build-core", "pybind11", "cmake", "ninja"):
            assert building[package] == developers[package]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("python", pythons())
def test_a_set_has_all_that_its_packages_ask_for(python: str, name: str) -> None:
    """Else pip, which takes nothing without a hash, refuses the whole. What torch asks for is its build's."""
    versions, parents = locked(python, *SETS[name]), asked_for(python, name == "building")
    missing = {package: wanting for package, wanting in parents.items() if package not in versions}
    assert {package: wanting for package, wanting in missing.items() if wanting & set(versions)} == {}
    assert sum(len(wanting) for wanting in parents.values()) > 30


def test_nothing_is_missing_of_what_packages_ask_for() -> None:
    """The same by what packages say that are installed here at the locked version."""
    python = "{}.{}".format(*sys.version_info[:2])
    versions = locked(python, *SETS["developer"]) | {"torch": locked(python, "cuda")["torch"]}
    looked_at = 0
    for name, version in versions.items():
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if found.version.partition("+")[0] != version:
            continue
        looked_at += 1
        for text in found.requires or ():
            one = Requirement(text)
            if one.marker is not None and not one.marker.evaluate({"extra": ""}):
                continue
            other = canonicalize_name(one.name)
            assert other in versions, f"{name} asks for {text}"
            assert one.specifier.contains(versions[other], prereleases=True), f"{name} asks for {text}"
    assert looked_at > 20
