"""Guards the rendered Pod and the compose file by running them: `make test-pod`, with podman, no registry.

The Pod speaks mutual TLS between its processes and HTTPS to clients, the compose file's containers plain
text.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.utils import canonicalize_name

from tests.helpers.certificates import Authority, write_secret
from tests.helpers.chart import ROOT, render
from tests.helpers.locks import SETS, locked

pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
from tests.k8s.manifests import pod_specs
from tests.k8s.podman import IMAGE, MISSING_TOOL, SHARED_MEMORY, USER, PodmanPod, environment, podman

pytestmark = [pytest.mark.pod, pytest.mark.timeout(2400)]
START_S = 240.0
TOKENS, LONG = 24, 1500
DRAIN_S = 120
# Sent from inside the gateway's container: the Pod has no network.
CHAT = """
import json, ssl, sys, urllib.request
body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0,
        "max_tokens": int(sys.argv[1]), "ignore_eos": True, "stream": sys.argv[2] == "stream"}
ca = "".join(sys.argv[3:])
url = "http" + "s" * bool(ca) + "://127.0.0.1:8000/v1/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
context = ssl.create_default_context(cadata=ca) if ca else None
answer = urllib.request.urlopen(request, timeout=200, context=context)
for line in answer:
    print(line.decode().strip(), flush=True)
"""
SCRAPE = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:%s/metrics').read().decode())"


@pytest.fixture(scope="module")
def image(request: pytest.FixtureRequest) -> str:
    """The CPU image of these sources, or, with --pod-image, of those it was built from last."""
    if request.config.getoption("--pod-image"):
        return IMAGE
    script = ROOT / "tests" / "k8s" / "build_image.sh"
    built = subprocess.run([script, IMAGE], capture_output=True, text=True, timeout=2000)
    if built.returncode == MISSING_TOOL:
        pytest.skip(built.stderr.strip())
    assert built.returncode == 0, (built.stdout + built.stderr)[-4000:]
    return IMAGE


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one small checkpoint that everybody may read."""
    from lab.random_model import RandomModelOptions, write_random_model

    directory = tmp_path_factory.mktemp("models")
    write_random_model(
        directory / "tiny", RandomModelOptions("tiny", "bfloat16", 0, 0.0, "none", "random", 0, 2)
    )
    for path in (directory, *directory.parents[:2], *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return directory


def values(models: Path) -> dict[str, Any]:
    """Returns two expert servers, no GPU, the gateway in the Pod."""
    return {
        "model": {
            "name": "tiny",
            "path": "tiny",
            "source": {"type": "hostPath", "hostPath": {"path": str(models)}},
        },
        "engine": {"cpus": 1, "memoryMiB": 2048},
        "experts": {"servers": 2, "cpus": 1, "memoryMiB": 1024, "weightsMiB": 256},
        "gateway": {"inPod": True, "cpus": 1},
        "tls": {
            "grpc": {"mode": "mutual", "secretName": "processes"},
            "http": {"secretName": "web"},
        },
        "shmMiB": 256,
        "drainSeconds": DRAIN_S,
        "config": {
            "gpu": {"kv_cache_gib": 0.1},
            "model": {"dtype": "float32"},
            "experts": {"batch_invariant_experts": True},
        },
    }


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the certificates of the processes, and of the HTTP server, by two CAs."""
    found = {}
    for name in ("processes", "web"):
        directory, authority = tmp_path_factory.mktemp(name), Authority(f"{name} CA")
        write_secret(directory, authority.issue(name), authority.pem)
        for path in (directory, *directory.parents[:2], *directory.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        found[name] = directory
    return found


@pytest.fixture(scope="module")
def pod(
    image: str, models: Path, secrets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PodmanPod]:
    """The Pod of a release, as the chart renders it."""
    manifests = render(values(models), name="podtest")
    component = "app.kubernetes.io/component"
    template = next(one for one in pod_specs(manifests) if one["metadata"]["labels"][component] == "engine")
    maps = [one for one in manifests if one["kind"] == "ConfigMap"]
    directory = tmp_path_factory.mktemp("pod")
    name = f"moebius-{os.getpid()}"
    running = None
    try:
        running = PodmanPod(name, template, maps, directory, secrets)
        running.ca = (secrets["web"] / "ca.crt").read_text()
        yield running
    finally:
        if running is not None:
            running.remove()
        else:
            podman("pod", "rm", "--force", name, check=False)
            shutil.rmtree(SHARED_MEMORY / name, ignore_errors=True)


def chat(pod: PodmanPod, tokens: int = TOKENS, stream: bool = False) -> str:
    """Returns the answer's text."""
    done = pod.python("gateway", CHAT, str(tokens), "stream" if stream else "whole", pod.ca, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:] + pod.logs("engine")[-3000:]
    if not stream:
        return str(json.loads(done.stdout)["choices"][0]["message"]["content"])
    return text_of(done.stdout)


def text_of(stream: str) -> str:
    """Returns the text of a stream's lines, which have to be whole."""
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def test_the_preflight_has_passed(pod: PodmanPod) -> None:
    """It read the Pod's volumes and the planner's numbers, and found no failure."""
    log = pod.logs("preflight")
    assert pod.inspect("preflight")["ExitCode"] == 0, log
    assert "ok      volume for packed experts" in log
    assert "ok      /dev/shm: " in log
    assert "ok      certificates of gRPC: CN=processes" in log
    assert "FAILURE" not in log


def test_the_pod_serves_and_survives_an_expert_server(pod: PodmanPod) -> None:
    """All probes say ready; a killed server comes back with what it had packed, and answers stay the same."""
    for name in ("expert-0", "expert-1", "engine", "gateway"):
        pod.wait_ready(name, START_S)
    expected = chat(pod)
    assert chat(pod, stream=True) == expected
    pod.kill_process("expert-1")
    assert chat(pod) == expected
    pod.wait_ready("expert-1", START_S)
    # Its second start reads no checkpoint: what its predecessor had packed is on the volume.
    assert pod.logs("expert-1").count('"experts loaded"') >= 1
    scraped = pod.python("expert-1", SCRAPE % 9412).stdout
    assert "moebius:expert_serving 1.0" in scraped
    assert "moebius:expert_numa_node" in scraped
    assert "vllm:" in pod.python("engine", SCRAPE % 9401).stdout


def test_the_image_is_lean_and_listed(image: str) -> None:
    """No compiler, no pip, no process of root, and a list of what is in it."""
    run = ("run", "--rm", "--network=none", "--read-only", "--entrypoint", "/bin/sh", image, "-c")
    found = podman(*run, "id -u; command -v gcc g++ cc pip pip3; cat /opt/moebius/share/sbom.cdx.json").stdout
    user, _, text = found.partition("\n")
    assert user == "10001"
    assert text.lstrip().startswith("{"), text[:200]
    listed = json.loads(text)
    debian = {
        one["name"] for one in listed["components"] if one.get("purl", "").startswith("pkg:deb/debian/")
    }
    assert {"libc6", "python3", "ca-certificates"} <= debian
    python = [one for one in listed["components"] if not one.get("purl", "").startswith("pkg:deb/")]
    names = {canonicalize_name(one["name"]): one["version"] for one in python}
    assert listed["metadata"]["component"]["name"] == "moebius"
    assert {"torch", "grpcio", "uvicorn"} <= set(names)
    # The base is Debian 12.
    wanted = locked("3.11", *SETS["CPU image"]) | {"torch": locked("3.11", "cuda")["torch"]}
    found = {name: version.partition("+")[0] for name, version in names.items() if name != "moebius"}  # type: ignore[assignment]
    assert found == wanted


def test_sigterm_drains(pod: PodmanPod) -> None:
    """Containers first, then sidecars, as a kubelet does it: a stream that has begun gets its end, which
    takes longer than the signals, and all leave in order."""
    for name in ("expert-0", "expert-1", "engine", "gateway"):
        pod.wait_ready(name, START_S)
    # Asked from a sidecar: what runs in the gateway's container ends with it.
    command = [
        "podman",
        "exec",
        pod.container("expert-0"),
        "python3",
        "-c",
        CHAT,
        str(LONG),
        "stream",
        pod.ca,
    ]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        begun = client.stdout.readline()
        stops = [
            threading.Thread(
                target=podman,
                args=("stop", "--time", str(DRAIN_S + 30), pod.container(name)),
                kwargs={"timeout": DRAIN_S + 60},
            )
            for name in ("gateway", "engine")
        ]
        for stop in stops:
            stop.start()
        streamed = text_of(begun + client.stdout.read())
        for stop in stops:
            stop.join(DRAIN_S + 60)
    assert streamed
    for name, key in (("gateway", "requests"), ("engine", "running")):
        lines = [json.loads(line) for line in pod.logs(name).splitlines() if '"draining"' in line]
        assert [line[key] for line in lines] == [1], name
    for name in ("expert-0", "expert-1"):
        podman("stop", "--time", "60", pod.container(name))
    statuses = {name: pod.inspect(name)["ExitCode"] for name in ("gateway", "engine", "expert-0", "expert-1")}
    assert statuses == dict.fromkeys(statuses, 0), pod.logs("engine")[-2000:]


def test_the_compose_files_containers_run(image: str, models: Path, tmp_path: Path) -> None:
    """The same commands and settings as in deploy/compose.yaml, started in no particular order."""
    services = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]
    name = f"compose-{os.getpid()}"
    config = tmp_path / "moebius.yaml"
    config.write_text((ROOT / "deploy/moebius.yaml").read_text())
    config.chmod(0o644)
    tmp_path.chmod(0o755)
    podman("pod", "create", "--network=none", "--name", name)
    try:
        for service in ("engine", "expert-1", "gateway", "expert-0"):
            podman(*compose_arguments(services[service], name, service, models, config))
        code = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=3)"
        end = time.monotonic() + START_S
        while podman("exec", f"{name}-gateway", "python3", "-c", code, check=False).returncode:
            logs = podman("logs", f"{name}-engine", check=False)
            assert time.monotonic() < end, (logs.stdout + logs.stderr)[-3000:]
            time.sleep(1.0)
        done = podman("exec", f"{name}-gateway", "python3", "-c", CHAT, "8", "whole", timeout=240)
        assert json.loads(done.stdout)["usage"]["completion_tokens"] == 8
    finally:
        podman("pod", "rm", "--force", "--time", "5", name, check=False, timeout=180)
        shutil.rmtree(SHARED_MEMORY / name, ignore_errors=True)


def compose_arguments(service: dict[str, Any], pod: str, name: str, models: Path, config: Path) -> list[str]:
    """`podman run` of what docker compose would run."""
    arguments = ["run", "--detach", "--pod", pod, "--name", f"{pod}-{name}", "--user", service["user"]]
    arguments += ["--read-only", "--cap-drop", "ALL", "--env", "HOME=/cache", "--tmpfs", "/tmp"]
    arguments += ["--tmpfs", "/run/moebius:mode=0777"]
    for text in service["volumes"]:
        source, target = text.replace("${MODELS:?a directory of checkpoints}", str(models)).split(":", 1)
        source = str(config) if source == "./moebius.yaml" else source
        if not source.startswith("/"):
            # As the file's tmpfs options make it: memory of the image's user.
            place = SHARED_MEMORY / pod / source
            place.mkdir(parents=True, exist_ok=True)
            os.chown(place, USER, USER)
            source = str(place)
        arguments += ["--volume", f"{source}:{target}"]
    words = [
        word.replace("${MODEL:?a checkpoint in MODELS}", "tiny").replace("${MODEL}", "tiny")
        for word in service["command"]
    ]
    return [*arguments, IMAGE, *words]
