"""Runs a rendered Pod with podman, which knows less of Pods than a kubelet: what it lacks is done here.

Native sidecars become containers that start first; probes are asked from inside; Secrets are directories;
ends are sent in the order in which a kubelet sends them.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tests.helpers.chart import ROOT, Manifest

WORK = ROOT / "build" / "pod"
IMAGE = "localhost/moebius:pod-test"
MISSING_TOOL = 77
USER = 10001
# Init containers stay, with their logs, when they have ended.
INIT = {"io.podman.annotations.init.container.type": "always"}
SHARED_MEMORY = Path("/dev/shm")


def environment() -> dict[str, str]:
    """In which podman finds its settings and the images that were built."""
    return {**os.environ, "CONTAINERS_CONF": str(WORK / "containers.conf"), "STORAGE_DRIVER": "vfs"}


def podman(*arguments: str, check: bool = True, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Returns one command; raises AssertionError with what it said."""
    done = subprocess.run(
        ["podman", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert done.returncode == 0 or not check, (
        f"podman {' '.join(arguments[:4])}: {done.stderr or done.stdout}"
    )
    return done


def for_podman(pod: Manifest, name: str, secrets: Mapping[str, Path]) -> Manifest:
    """A Pod of a template, without what podman 4.3 does not know.

    `secrets`: the directory of each Secret's files.
    """
    spec = copy.deepcopy(pod["spec"])
    sidecars = [one for one in spec.get("initContainers") or [] if one.get("restartPolicy") == "Always"]
    spec["initContainers"] = [one for one in spec.get("initContainers") or [] if one not in sidecars]
    spec["containers"] = [*sidecars, *spec["containers"]]
    for container in (*spec["initContainers"], *spec["containers"]):
        container["image"] = IMAGE
        container["imagePullPolicy"] = "Never"
        container.pop("restartPolicy", None)
        container.pop("lifecycle", None)
        for each in container.get("env", ()):
            if each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath") == "metadata.namespace":
                each.pop("valueFrom")  # podman has no namespaces
                each["value"] = "moebius"
        container.pop("ports", None)  # which it would publish, on a network
        # Nested in another container, limits cannot be set.
        container.pop("resources", None)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            container.pop(probe, None)
    for volume in spec["volumes"]:
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            # A directory of this machine's memory: podman would make one on the disk, for root alone.
            place = SHARED_MEMORY / name / volume["name"]
            place.mkdir(parents=True)
            os.chown(place, USER, USER)
            volume.pop("emptyDir")
            volume["hostPath"] = {"path": str(place), "type": "Directory"}
        if "secret" in volume:
            place = secrets[volume.pop("secret")["secretName"]]
            volume["hostPath"] = {"path": str(place), "type": "Directory"}
    for key in ("affinity", "serviceAccountName", "securityContext"):
        spec.pop(key, None)
    spec["restartPolicy"] = "Always"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": pod["metadata"]["labels"], "annotations": INIT},
        "spec": spec,
    }


class PodmanPod:
    """A running Pod; its containers are named as in the manifest."""

    ca = ""  # by which clients check the gateway, PEM; set by the maker of its certificate

    def __init__(
        self,
        name: str,
        pod: Manifest,
        config_maps: Sequence[Manifest],
        directory: Path,
        secrets: Mapping[str, Path],
    ) -> None:
        self.name = name
        self._probes = {
            one["name"]: one
            for one in (*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"])
        }
        file = directory / "pod.yaml"
        documents = [*config_maps, for_podman(pod, name, secrets)]
        file.write_text(yaml.safe_dump_all(documents, sort_keys=False))
        try:
            podman("play", "kube", "--network=none", str(file), timeout=300)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs('preflight')}") from error

    def container(self, name: str) -> str:
        """Returns the container as podman calls it."""
        return f"{self.name}-{name}"

    def inspect(self, name: str) -> Manifest:
        """Returns what podman knows of a container's state."""
        found: list[Manifest] = json.loads(podman("inspect", self.container(name)).stdout)
        state: Manifest = found[0]["State"]
        return state

    def logs(self, name: str) -> str:
        done = podman("logs", self.container(name), check=False)
        return done.stdout + done.stderr

    def python(
        self, name: str, code: str, *arguments: str, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Runs Python inside a container."""
        return podman(
            "exec", self.container(name), "python3", "-c", code, *arguments, check=False, timeout=timeout
        )

    def is_ready(self, name: str) -> bool:
        """What the container's readiness probe would say."""
        probe = self._probes[name]["readinessProbe"]["httpGet"]
        (port,) = (
            one["containerPort"] for one in self._probes[name]["ports"] if one["name"] == probe["port"]
        )
        url = f"http://127.0.0.1:{port}{probe['path']}"
        return self.python(name, f"import urllib.request as u; u.urlopen('{url}', timeout=3)").returncode == 0

    def wait_ready(self, name: str, limit_s: float) -> None:
        """Raises AssertionError with the container's last lines."""
        end = time.monotonic() + limit_s
        while not self.is_ready(name):
            assert time.monotonic() < end, f"{name} is not ready:\n{self.logs(name)[-3000:]}"
            time.sleep(1.0)

    def kill_process(self, name: str) -> None:
        """Kills the process as the kernel does: podman did not ask for it, so its restart policy applies."""
        os.kill(int(self.inspect(name)["Pid"]), 9)

    def remove(self) -> None:
        """The Pod, and its volumes."""
        podman("pod", "rm", "--force", "--time", "5", self.name, check=False, timeout=180)
        shutil.rmtree(SHARED_MEMORY / self.name, ignore_errors=True)
