"""Invariant: `moebius doctor` says what is special about machines that are not the one that tests run on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from app.doctor.checks import Finding, check_host
from app.doctor.facts import Facts, GpuLink, read_facts
from app.doctor.machine_checks import (
    SMALL_PAGES_COST,
    Versions,
    check_machine,
    check_pinned,
    check_versions,
    read_versions,
    seen_link,
    with_effects,
)
from app.planning.capacity import Wish
from app.planning.planner import Planner
from lab.random_model.shapes import parse_shape
from tests.helpers.machine_trees import MACHINES
from tests.helpers.plan_models import hardware, settings, write_config


def facts_of(name: str, root: Path) -> Facts:
    """Without what the machine that runs the test brings in."""
    return dataclasses.replace(read_facts(MACHINES[name].write(root)), open_files=10**6, page_size=4096)


def by_check(findings: object) -> dict[str, Finding]:
    return {finding.check: finding for finding in findings}  # type: ignore[attr-defined]


def warnings(name: str, root: Path) -> set[str]:
    """What has to be fixed on a machine."""
    facts = facts_of(name, root)
    findings = [*check_host(facts), *check_machine(facts, {})]
    assert all(finding.fix for finding in findings if finding.status != "ok")
    return {finding.check for finding in findings if finding.status != "ok"}


def test_a_socket_in_four_nodes(tmp_path: Path) -> None:
    """NPS4 is named, and that every node has an expert server; modules are counted, and empty places."""
    facts = facts_of("nps4", tmp_path)
    assert (facts.nodes_per_socket, facts.threads_per_core, len(facts.topology.nodes)) == (4, 2, 8)
    assert facts.memory_modules == (("Registered-DDR4", 8),)
    found = by_check(check_machine(facts, dict.fromkeys(range(8), 20e9)))
    assert found["NUMA nodes of a socket"].found.startswith("4 (NPS4")
    assert found["memory channels"].status == "warning"
    assert "8 x Registered-DDR4; 160 GB/s are read" in found["memory channels"].found
    assert "6.2 channels of DDR4-3200" in found["memory channels"].found
    assert "8 places for modules are empty" in found["memory channels"].fix


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nps4", set()),  # without a measurement empty places are no warning
        ("wsl2", {"WSL2", "swap", "swappiness"}),
        ("laptop", {"CPU governor", "swap"}),
    ],
)
def test_what_a_machine_has_to_mend(name: str, expected: set[str], tmp_path: Path) -> None:
    """Each machine has its own warnings and no other's."""
    assert warnings(name, tmp_path) == expected


@pytest.mark.parametrize(
    ("driver", "cuda", "status", "fix"),
    [
        ("", "", "ok", ""),
        ("570.86", "12.8", "ok", ""),
        ("470.199", "12.8", "failure", "a driver from 525 on"),
        ("570.86", "13.0", "failure", "`.[gpu-cu12]`"),
        ("580.65", "13.0", "ok", ""),
        ("580.65", "", "warning", "no CUDA"),
    ],
)
def test_a_driver_has_to_be_as_new_as_cuda_asks(driver: str, cuda: str, status: str, fix: str) -> None:
    """Versions that cannot work together are a failure that names the oldest driver and the way out."""
    found = check_versions(Versions("2.9.0", cuda, ""), driver)
    assert found.status == status
    assert fix in found.fix
    assert found.found == f"driver {driver or 'none'}, CUDA {cuda or 'none'}, torch 2.9.0, FlashInfer none"


def test_versions_are_those_that_are_installed() -> None:
    """They are read without importing anything."""
    import torch

    found = read_versions()
    assert found.torch == torch.__version__ or found.torch in torch.__version__
    assert found.cuda == (torch.version.cuda or "")


def test_a_limit_of_page_locked_memory_is_named() -> None:
    """With what it means and what raises it; as much as was tried is no limit."""
    whole, limited = check_pinned(None, 48 * 2**30), check_pinned(700 * 2**20, 48 * 2**30)
    assert (whole.status, whole.found) == ("ok", "48.0 GiB, as much as was tried")
    assert (limited.status, limited.found) == ("warning", "at most 0.68 GiB")
    assert "through a small buffer" in limited.fix
    assert ".wslconfig" in limited.fix


def test_findings_say_what_they_cost(tmp_path: Path) -> None:
    """Small pages lengthen the part of a step that reads experts in RAM; a narrow link that of prompts."""
    model = write_config(tmp_path / "qwen", parse_shape("qwen3-30b-a3b", 0).hf_config(None))
    config = settings(model, expert_dtype="int4", gpu_experts="8")
    host = hardware("4090", ram_gib=64, bandwidth=80e9, cpu_flops=5e12, isa="avx2")
    assert host.gpu is not None
    narrow = seen_link([GpuLink("0000:01:00.0", -1, 4, 16, 16.0, 16.0)])
    assert narrow == 0.25
    less = dataclasses.replace(host, gpu=dataclasses.replace(host.gpu, link=narrow * host.gpu.link))
    full, seen = (Planner(config, on_gpu=True).plan(each, Wish(context=8192)) for each in (host, less))
    pages = Finding("2 MiB pages of shared memory", "warning", "none", "echo")
    lanes = Finding("PCIe of 0000:01:00.0", "warning", "x4 of x16", "another slot")
    calm = Finding("2 MiB pages of shared memory", "ok", "enough")
    other = Finding("CPU governor", "warning", "powersave", "performance")
    found = with_effects([pages, lanes, calm, other], full, seen)
    one, prompts = seen.decode[0], full.prefill.tokens_per_second
    lost = one.tokens_per_second - 1 / (one.seconds.total + SMALL_PAGES_COST * one.seconds.cpu_experts)
    cost = f"costs about {lost:.1f} of {one.tokens_per_second:.1f} tokens/s in decode"
    assert found[0].found.endswith(cost)
    slower = prompts - seen.prefill.tokens_per_second
    assert slower > 0
    assert found[1].found.endswith(f"costs about {slower:.0f} of {prompts:.0f} tokens/s of prompts")
    assert found[2:] == [calm, other]
