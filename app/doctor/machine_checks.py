"""Judges what people buy or set in a firmware, and versions; and what findings cost a model in tokens/s."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from app.doctor.checks import Finding
from app.doctor.facts import Facts, GpuLink

if TYPE_CHECKING:
    from app.planning.capacity import CapacityPlan

GIB = 2**30
PAGES, LINK = "2 MiB pages of shared memory", "PCIe of"
# Bytes a second of one channel: DDR4-3200, DDR5-4800, as the makers of modules count them.
CHANNEL_BANDWIDTH = {"DDR4-3200": 25.6e9, "DDR5-4800": 38.4e9}
# Of reading experts in pages of 4 KiB, as the check itself says.
SMALL_PAGES_COST = 0.07
# The oldest driver for each major version of CUDA (NVIDIA's release notes, "CUDA Driver").
OLDEST_DRIVERS: Mapping[int, int] = {12: 525, 13: 580}
CALM_SWAPPINESS = 10


def check_machine(facts: Facts, bandwidth: Mapping[int, float]) -> Iterator[Finding]:
    """Yields findings on processors, memory and Windows. `bandwidth`: bytes a second that were read from each
    NUMA node's memory; empty: not measured.
    """
    threads = facts.threads_per_core
    found = {0: "not known", 1: "one thread a core"}.get(threads, f"{threads} threads a core")
    yield Finding("SMT", "ok", f"{found}; expert servers compute with one on each core")
    yield _nodes_of_socket(facts)
    swaps = facts.swap_bytes > 0 and facts.swappiness > CALM_SWAPPINESS
    fix = f"weights are swapped out for files that were read: sysctl vm.swappiness={CALM_SWAPPINESS}"
    yield Finding("swappiness", "warning" if swaps else "ok", str(facts.swappiness), fix if swaps else "")
    yield _memory(facts, bandwidth)
    if facts.is_wsl:
        yield Finding(
            "WSL2",
            "warning",
            "Linux below Windows",
            "its driver pins half of the RAM at most, often less (--measure tries it), so that experts are "
            "copied to the GPU more slowly: native Linux, or more memory in %UserProfile%/.wslconfig ([wsl2] "
            "memory=)",
        )


def check_pinned(limit: int | None, wanted: int) -> Finding:
    """Returns how much can be page-locked, bytes, as it was tried up to `wanted`; `limit` None: all of it."""
    if limit is None:
        return Finding("page-locked memory", "ok", f"{wanted / GIB:.1f} GiB, as much as was tried")
    from gpu_service.device.pinned import MORE_PINNED

    return Finding(
        "page-locked memory",
        "warning",
        f"at most {limit / GIB:.2f} GiB",
        "experts beyond it are copied to the GPU through a small buffer, which takes the host's time, and "
        f"decode steps fetch none of them: {MORE_PINNED}",
    )


def _nodes_of_socket(facts: Facts) -> Finding:
    count = facts.nodes_per_socket
    if count <= 1:
        return Finding("NUMA nodes of a socket", "ok", str(count) if count else "not known")
    return Finding(
        "NUMA nodes of a socket",
        "ok",
        f"{count} (NPS{count} or sub-NUMA clusters): one expert server each, with the memory of its node",
    )


def _memory(facts: Facts, bandwidth: Mapping[int, float]) -> Finding:
    modules = ", ".join(f"{count} x {kind}" for kind, count in facts.memory_modules) or "modules not known"
    if not bandwidth:
        fix = "`moebius doctor --measure` measures what each node gives"
        return Finding("memory channels", "ok", f"{modules}; bandwidth not measured", fix)
    total = sum(bandwidth.values())
    channels = " or ".join(
        f"{total / each:.1f} channels of {name}" for name, each in CHANNEL_BANDWIDTH.items()
    )
    text = f"{modules}; {total / 1e9:.0f} GB/s are read, the peak of {channels}"
    if not facts.empty_places:
        return Finding("memory channels", "ok", text)
    fix = f"{facts.empty_places} places for modules are empty: decode is as fast as all channels together"
    return Finding("memory channels", "warning", text, fix)


@dataclass(frozen=True)
class Versions:
    """The versions of libraries beside us, "" of one that is not installed; filled by `read_versions`."""

    torch: str
    cuda: str  # That torch was built for.
    flashinfer: str


def read_versions() -> Versions:
    """Returns versions by the files of the packages: importing torch would take seconds."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    text = file.read_text() if file is not None and file.exists() else ""
    cuda = re.search(r"^cuda[^=]*=\s*'([\d.]+)'", text, re.MULTILINE)
    return Versions(_version("torch"), cuda[1] if cuda else "", _version("flashinfer-python"))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def check_versions(versions: Versions, driver: str) -> Finding:
    """Returns what is installed, and whether the driver is as new as torch's CUDA asks for; `driver`: "":
    none is loaded.
    """
    text = ", ".join(
        f"{name} {version or 'none'}"
        for name, version in (
            ("driver", driver),
            ("CUDA", versions.cuda),
            ("torch", versions.torch),
            ("FlashInfer", versions.flashinfer),
        )
    )
    if not driver:
        return Finding("versions", "ok", text)
    if not versions.cuda:
        return Finding("versions", "warning", text, "this torch has no CUDA: docs/install-gpu.md")
    oldest = OLDEST_DRIVERS.get(int(versions.cuda.partition(".")[0]), 0)
    if int(driver.partition(".")[0]) < oldest:
        fix = f"CUDA {versions.cuda} needs a driver from {oldest} on: a newer driver, or `.[gpu-cu12]`"
        return Finding("versions", "failure", text, fix)
    return Finding("versions", "ok", text)


def with_effects(findings: Sequence[Finding], full: CapacityPlan, seen: CapacityPlan) -> list[Finding]:
    """Returns the findings with what each costs in tokens a second, where that is known.

    `full`, `seen`: plans of the model here, with all lanes that GPUs have and with those that are used.
    """
    return [_with_effect(finding, full, seen) for finding in findings]


def seen_link(links: Sequence[GpuLink]) -> float:
    """Returns the share of its lanes that the narrowest link uses, 0 to 1."""
    return min((link.width / link.max_width for link in links if link.width and link.max_width), default=1.0)


def _with_effect(finding: Finding, full: CapacityPlan, seen: CapacityPlan) -> Finding:
    if finding.status != "warning":
        return finding
    one, prompts = seen.decode[0], full.prefill.tokens_per_second
    if finding.check == PAGES:
        slower = one.rows / (one.seconds.total + SMALL_PAGES_COST * one.seconds.cpu_experts)
        lost = one.tokens_per_second - slower
        text = f"costs about {lost:.1f} of {one.tokens_per_second:.1f} tokens/s in decode"
    elif finding.check.startswith(LINK):
        lost = prompts - seen.prefill.tokens_per_second
        text = f"costs about {lost:.0f} of {prompts:.0f} tokens/s of prompts"
    else:
        return finding
    return replace(finding, found=f"{finding.found}; {text}")
