"""Guards `moebius doctor`: what is wrong with a host or a Pod's node is named, each with what fixes it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from app import cli
from app.doctor.checks import (
    Expectation,
    Finding,
    check_certificates,
    check_host,
    check_kubelet,
    check_pod,
    check_threads,
)
from app.doctor.facts import Facts, Volume, read_facts, read_memory_limit, read_volume
from app.supervisor.expert_placement import ServerBinding
from moebius.config import SecurityConfig
from tests.helpers.certificates import Authority, grpc_security, write_secret

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> None:
    """Files below a root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def two_sockets(root: Path, cpus: str = "0-7", nodes: str = "0-1", **more: str) -> Path:
    """A machine of two nodes of four CPUs, on which a container may use `cpus` and memory of `nodes`."""
    files = {
        "sys/devices/system/cpu/online": "0-7",
        "sys/devices/system/node/online": "0-1",
        "proc/self/status": f"Cpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{nodes}",
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/cpuset.cpus.effective": cpus,
        "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
    }
    for node in (0, 1):
        place = f"sys/devices/system/node/node{node}"
        files[f"{place}/cpulist"] = f"{4 * node}-{4 * node + 3}"
        files[f"{place}/meminfo"] = f"Node {node} MemTotal: 1024 kB\nNode {node} MemFree: 512 kB"
        files[f"{place}/hugepages/hugepages-2048kB/nr_hugepages"] = "0"
        files[f"{place}/hugepages/hugepages-2048kB/free_hugepages"] = "0"
    write(root, files | more)
    return root


def problems(findings: Any) -> dict[str, Finding]:
    """Returns the findings that have to be fixed, by name; each says how."""
    found = {finding.check: finding for finding in findings if finding.status != "ok"}
    assert all(finding.fix for finding in found.values())
    return found


def quiet(root: Path) -> Facts:
    """Returns facts without what the machine that runs the test brings in."""
    return dataclasses.replace(read_facts(root), open_files=10**6, page_size=4096)


def test_a_good_host_has_no_findings(tmp_path: Path) -> None:
    """Nothing is reported where nothing is wrong."""
    assert problems(check_host(quiet(two_sockets(tmp_path)))) == {}


@pytest.mark.parametrize(
    ("name", "text", "check", "fix"),
    [
        ("proc/sys/kernel/numa_balancing", "1", "kernel.numa_balancing", "sysctl kernel.numa_balancing=0"),
        ("sys/devices/system/cpu/cpu3/cpufreq/scaling_governor", "powersave", "CPU governor", "performance"),
        ("sys/devices/system/cpu/isolated", "2-3", "isolated CPUs", "isolcpus"),
        (
            "sys/kernel/mm/transparent_hugepage/shmem_enabled",
            "always advise [never]",
            "2 MiB pages of shared memory",
            "echo advise >",
        ),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always [never]", "transparent huge pages", "madvise"),
        ("proc/swaps", "Filename Type Size Used Priority\n/dev/s partition 2048 0 -2", "swap", "swapoff"),
        ("sys/fs/cgroup/cpu.max", "200000 100000", "CPU limit", "pin as many CPUs as the limit"),
        ("sys/fs/cgroup/cpu.stat", "nr_periods 9\nnr_throttled 4", "throttling", "raise its CPU limit"),
        (
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Kernel Module  570.1  x",
            "GPUs",
            "device plugin",
        ),
    ],
)
def test_each_hindrance_is_named(tmp_path: Path, name: str, text: str, check: str, fix: str) -> None:
    """One file of the kernel changes one line of the report, with what fixes it."""
    found = problems(check_host(quiet(two_sockets(tmp_path, **{name: text}))))
    assert list(found) == [check]
    assert fix in found[check].fix


def test_a_gpu_on_too_few_lanes_is_named(tmp_path: Path) -> None:
    """A slower clock is none: links idle."""
    device = "sys/bus/pci/devices/0000:3b:00.0"
    links = {"current_link_width": "8", "max_link_width": "16", "numa_node": "1"}
    links |= {"current_link_speed": "2.5 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}
    write(tmp_path, {f"{device}/{file}": text for file, text in links.items()})
    write(tmp_path, {"proc/driver/nvidia/gpus/0000:3b:00.0/information": "Model: X", "dev/nvidia0": ""})
    found = problems(check_host(quiet(two_sockets(tmp_path))))["PCIe of 0000:3b:00.0"]
    assert found.found == "x8 of x16, 2.5 of 32 GT/s, NUMA node 1 (idle GPUs slow their link down)"


@pytest.mark.parametrize("version", [1, 2])
def test_memory_limits_of_both_cgroup_versions(tmp_path: Path, version: int) -> None:
    """The smallest one on the way to the top counts; no limit is none."""
    base = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory"
    line, name = ("0::/a/b", "memory.max") if version == 2 else ("4:memory:/a/b", "memory.limit_in_bytes")
    write(tmp_path, {"proc/self/cgroup": line, f"{base}/a/{name}": "5000", f"{base}/a/b/{name}": "7000"})
    assert read_memory_limit(tmp_path) == 5000
    no_limit = "max" if version == 2 else "9223372036854771712"
    write(tmp_path, {f"{base}/a/{name}": no_limit, f"{base}/a/b/{name}": no_limit})
    assert read_memory_limit(tmp_path) is None


def volume(mib: int, kind: str = "tmpfs", writable: bool = True) -> Volume:
    return Volume(Path("/v"), mib > 0, writable, kind, mib * 2**20, mib * 2**20)


GOOD = Expectation(
    servers=2, numa_node="cpuset", mailbox_bytes=2**20, segments=(GIB, GIB), weights_bytes=2 * GIB
)


def test_a_pod_that_has_what_it_needs(tmp_path: Path) -> None:
    """No finding: as many nodes as servers, room for mailbox and experts, places to write."""
    facts = quiet(two_sockets(tmp_path))
    assert problems(check_pod(facts, GOOD, volume(64), volume(2048), [volume(1, "ext4")])) == {}


@pytest.mark.parametrize(
    ("change", "check", "fix"),
    [
        ({"expected": dataclasses.replace(GOOD, gpus=2)}, "GPUs of the Pod", "engine.gpus"),
        (
            {"expected": dataclasses.replace(GOOD, servers=3)},
            "NUMA nodes for expert servers",
            "experts.numa: auto",
        ),
        ({"shm": volume(0, "")}, "/dev/shm", "shmMiB of 65 or more"),
        ({"weights": volume(2047)}, "volume for packed experts", "experts.weightsMiB of 1024 or more"),
        (
            {"expected": dataclasses.replace(GOOD, weights_bytes=2 * GIB - 1)},
            "volume for packed experts",
            "experts.weightsMiB of 1024 or more",
        ),
        ({"weights": volume(2048, writable=False)}, "volume for packed experts", "experts.weightsMiB"),
        ({"weights": volume(2048, "hugetlbfs")}, "reserved 2 MiB pages", "reserve 512 pages on each node"),
        ({"places": [volume(1, "ext4", writable=False)]}, "/v is writable", "fsGroup"),
    ],
)
def test_what_a_pod_lacks_is_a_failure(tmp_path: Path, change: dict[str, Any], check: str, fix: str) -> None:
    """The line names the chart's value that would provide it."""
    given: dict[str, Any] = {"expected": GOOD, "shm": volume(64), "weights": volume(2048), "places": []}
    found = problems(check_pod(quiet(two_sockets(tmp_path)), **given | change))
    assert found[check].status == "failure"
    assert fix in found[check].fix


def test_a_disk_for_experts_is_a_warning(tmp_path: Path) -> None:
    """They can lie there, but slowly."""
    found = problems(check_pod(quiet(two_sockets(tmp_path)), GOOD, volume(64), volume(4096, "ext4"), []))
    assert {name: each.status for name, each in found.items()} == {"packed experts lie in memory": "warning"}


def test_a_servers_own_cpus(tmp_path: Path) -> None:
    """What the kubelet should have given to a server's container: CPUs and memory of one node."""
    expected = dataclasses.replace(GOOD, own_cpus=True)
    layouts = {"good": ("4-7", "1"), "spread": ("2-5", "0-1"), "far": ("4-7", "0")}
    found = {}
    for name, (cpus, nodes) in layouts.items():
        facts = quiet(two_sockets(tmp_path / name, cpus, nodes))
        found[name] = problems(check_pod(facts, expected, volume(64), volume(2048), []))
    assert found["good"] == {}
    assert "node 0: 2-3, node 1: 4-5" in found["spread"]["CPUs of this container"].found
    assert (
        "CPUs given to this process are of node 1, its memory of [0]"
        in found["far"]["CPUs of this container"].found
    )
    assert "topologyManagerPolicy" in found["spread"]["CPUs of this container"].fix


def test_the_kubelets_settings_are_judged() -> None:
    """What `experts.numa: kubelet` relies on has to be set; with `auto` it would be faster."""
    good = {
        "cpuManagerPolicy": "static",
        "topologyManagerPolicy": "restricted",
        "memoryManagerPolicy": "Static",
    }
    assert problems(check_kubelet(good, GOOD)) == {}
    found = problems(check_kubelet({}, GOOD))
    assert {name: each.status for name, each in found.items()} == {
        "cpuManagerPolicy": "failure",
        "topologyManagerPolicy": "failure",
        "memoryManagerPolicy": "warning",
    }
    relaxed = problems(check_kubelet({}, dataclasses.replace(GOOD, numa_node="auto")))
    assert {each.status for each in relaxed.values()} == {"warning"}
    whole = good | {"topologyManagerPolicy": "single-numa-node", "topologyManagerScope": "pod"}
    assert (
        "all expert servers would be on one node"
        in problems(check_kubelet(whole, GOOD))["topologyManagerScope"].fix
    )


def test_volumes_are_recognised(tmp_path: Path) -> None:
    """Volumes are recognised by the longest mount above them."""
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"disk / ext4 rw 0 0\nshm {tmp_path} tmpfs rw 0 0\nh {tmp_path}/other hugetlbfs rw 0 0\n"
    )
    found = read_volume(tmp_path, mounts)
    assert (found.kind, found.in_memory, found.writable, found.exists) == ("tmpfs", True, True, True)
    assert not read_volume(tmp_path / "nothing", mounts).exists


def test_certificates_are_read_as_processes_will_read_them(tmp_path: Path) -> None:
    """A good one is shown with its end; an expired, foreign or missing one fails by name before anything
    loads; without TLS there is nothing to say."""
    authority, other = Authority(), Authority("other CA")
    assert list(check_certificates(SecurityConfig())) == []

    def found(mode: str = "mutual") -> Finding:
        (finding,) = check_certificates(grpc_security(tmp_path, mode))
        return finding

    write_secret(tmp_path, authority.issue("engine", end=30), authority.pem)
    assert found().status == "ok"
    assert "CN=engine" in found().found
    write_secret(tmp_path, authority.issue("engine", end=2), authority.pem)
    assert (found().status, found("tls").status) == ("warning", "warning")
    write_secret(tmp_path, authority.issue("engine", -5, -1), authority.pem)
    assert (found().status, "expired at" in found().found) == ("failure", True)
    write_secret(tmp_path, other.issue("engine"), authority.pem)
    assert "is not signed by a CA of grpc_ca_file" in found().found
    assert "tls.grpc.secretName" in found().fix
    (tmp_path / "tls.key").unlink()
    assert "tls.key cannot be read" in found().found


def run_cli(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([str(argument) for argument in arguments])
    return int(exit_info.value.code or 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 1 with a failure; the file says the same as the lines; a Pod's settings are its input."""
    config, report = tmp_path / "moebius.yaml", tmp_path / "report.json"
    config.write_text(
        f"model: {{model: {tmp_path}/nothing}}\n"
        "experts: {expert_servers: 2, split_count: 2, mailbox: m}\n"
        f"supervisor: {{state_dir: {tmp_path}}}\n"
    )
    assert run_cli("doctor", "--kubernetes", "--config", config, "--expect-gpus", "64", "--json", report) == 1
    out = capsys.readouterr().out
    document = json.loads(report.read_text())
    assert document["ok"] is False
    failed = {each["check"] for each in document["findings"] if each["status"] == "failure"}
    assert failed == {"GPUs of the Pod", "checkpoint"}
    assert all(f"FAILURE {check}: " in out for check in failed)
    assert len(out.splitlines()) == len(document["findings"])
    assert run_cli("doctor") == 0
    assert run_cli("doctor", "--role", "nobody") == 2
    capsys.readouterr()
    assert run_cli("doctor", "/no/such/model") == 1
    assert "FAILURE checkpoint: MODEL '/no/such/model'" in capsys.readouterr().out


def test_threads_and_their_reason_are_said_for_each_server() -> None:
    """No node is named where there is one; cores that instances share are a warning with a remedy."""
    (alone,) = check_threads([ServerBinding(-1, (0, 1), 2, "one for each CPU")])
    assert (alone.check, alone.status, alone.found) == ("expert threads", "ok", "2 (one for each CPU)")
    found = list(
        check_threads(
            [
                ServerBinding(0, (0, 1), 2, "one for each physical core"),
                ServerBinding(1, (2, 3), 1, "of 2 cores that are shared with port 8000", is_shared=True),
            ]
        )
    )
    assert [finding.check for finding in found] == ["expert threads of node 0", "expert threads of node 1"]
    assert "expert_threads" in problems(found)["expert threads of node 1"].fix
