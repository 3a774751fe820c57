"""What a host lacks to serve a model, by sizes alone.

`moebius serve` refuses it before it starts a process, and `moebius doctor MODEL` lists it. RAM and shared
memory are compared with what is sure, packed experts, evicted prefixes and the mailbox; what the planner
expects of everything else, `moebius plan` says, and `doctor` with it. Address space is compared with what
docs/containers.md asks for.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from app.doctor.facts import Volume, read_memory_limit, read_volume
from app.problems import Problems
from app.supervisor.runfile import SHARED_MEMORY
from moebius.config import MoebiusConfig
from moebius.errors import StartupError, UserError
from moebius.kernels.weight_segment import segment_path
from moebius.models.geometry import MoeGeometry
from moebius.process.limits import FEWEST_BYTES, total_memory

GIB, MIB = 2**30, 2**20
# `FEWEST_BYTES` was measured with the KV cache that a CPU has by default.
KV_CACHE_IN_FEWEST = GIB


@dataclass(frozen=True)
class Needs:
    """Bytes; filled by `needs_of`."""

    # 0: there is no mailbox.
    mailbox: int
    # Packed experts in RAM of each server that is started here.
    segments: tuple[int, ...]
    # The engine's part of the model; 0 where address space is not limited, so that nothing asks for it.
    engine: int = 0
    # RAM for prefixes that the KV cache evicts, of all ranks.
    prefixes: int = 0


@dataclass(frozen=True)
class Shortage:
    """One thing that is too small; filled by `find_shortages`."""

    # "/dev/shm", "RAM", "ulimit -v", "expert_weights_dir".
    of: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}. {self.remedy}"


def needs_of(given: MoebiusConfig, config: MoebiusConfig, model: MoeGeometry) -> Needs:
    """`config`: what was `given`, with as many `expert_servers` as are started here, and the mailbox's name.

    Raises CheckpointError or UserError for what cannot be packed.
    """
    from app.planning.memory import segment_bytes
    from app.planning.prefixes import prefix_bytes
    from moebius.mailbox.plan import mailbox_geometry, mailbox_names

    count = config.experts.expert_servers
    sizes = segment_bytes(config, model, count) if count else []
    if config.experts.cold_experts == "disk":
        share = config.experts.expert_memory_gib * GIB / max(1, sum(sizes))
        sizes = [int(share * size) for size in sizes]
    return Needs(
        mailbox_geometry(config, model).regions().total * len(mailbox_names(config)),
        tuple(sizes),
        _engine_bytes(given) if _address_space_limit() is not None else 0,
        prefix_bytes(config) * config.parallel.num_ranks,
    )


def missing_bytes(given: MoebiusConfig, config: MoebiusConfig, model: MoeGeometry) -> int:
    """Returns the RAM that will be taken beside engines' own: by packed experts that are not there yet,
    evicted prefixes and mailboxes; 0 where experts cannot be packed, which their server refuses. Arguments as
    of `needs_of`.
    """
    try:
        needs = needs_of(given, config, model)
    except (UserError, ValueError):
        return 0
    missing = sum(
        max(0, nbytes - _size(Path(segment_path(config.experts.expert_weights_dir, index))))
        for index, nbytes in enumerate(needs.segments)
    )
    return missing + needs.prefixes + needs.mailbox


def find_shortages(needs: Needs, weights_dir: str, root: Path = Path("/")) -> Iterator[Shortage]:
    """`weights_dir`: where the user has the packed experts lie; empty: in memory that `serve` makes."""
    if needs.mailbox:
        shortage = shared_memory_shortage(needs.mailbox, read_volume(SHARED_MEMORY))
        if shortage is not None:
            yield shortage
    yield from _address_space(needs)
    weights = read_volume(Path(weights_dir)) if weights_dir else None
    if weights is not None and weights.exists:
        yield from _weights_directory(needs, weights)
    in_memory = weights is None or weights.in_memory
    yield from _memory(needs if in_memory else replace(needs, segments=()), root)


def refuse_shortages(given: MoebiusConfig, config: MoebiusConfig, model: MoeGeometry) -> None:
    """Raises StartupError for a shortage, ConfigErrors for several. Arguments as of `needs_of`."""
    try:
        needs = needs_of(given, config, model)
    except (UserError, ValueError):
        return  # What cannot be packed is refused by the process that reads it, in its words.
    problems = Problems()
    for shortage in find_shortages(needs, given.experts.expert_weights_dir):
        with problems.collected():
            raise StartupError(str(shortage))
    problems.refuse()


def shared_memory_shortage(needed: int, found: Volume, error: str = "") -> Shortage | None:
    """Why no mailbox of `needed` bytes can be made, or was not (`error`); None: it can."""
    from moebius.mailbox import more_shared_memory

    reason = error
    if not found.exists:
        reason = "it does not exist"
    elif not found.writable:
        reason = "it is read-only, or another user's"
    elif found.free_bytes < needed:
        reason = f"it holds {found.total_bytes // MIB} MiB, and {found.free_bytes // MIB} MiB are free"
    if not reason:
        return None
    problem = f"the processes share {-(-needed // MIB)} MiB of memory in {SHARED_MEMORY}, but {reason}"
    return Shortage(str(SHARED_MEMORY), problem, more_shared_memory(needed))


def _address_space_limit() -> int | None:
    """Returns bytes; None: there is none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return limit if limit >= 0 else None


def _engine_bytes(config: MoebiusConfig) -> int:
    """Its weights in RAM, and of its KV cache what `FEWEST_BYTES` does not contain; 0: there is no plan."""
    from app.planning.capacity import Wish
    from app.planning.gpu_use import make_planner
    from app.planning.hardware import HardwareOptions, hardware
    from app.planning.memory import RAM
    from app.planning.report import quiet

    try:
        with quiet():
            host = hardware(HardwareOptions())
            plan = make_planner(config, host, fill=False).plan(host, Wish(), fill=False, explain=False)
    except (UserError, ValueError):
        return 0
    total = 0
    for one in plan.components:
        what = one.part.rpartition(": ")[2] if one.place == RAM and one.part.startswith("engine") else ""
        if what == "KV cache":
            total += max(0, one.nbytes - KV_CACHE_IN_FEWEST)
        elif what not in ("", "process", "activations", "a tensor while loading"):
            total += one.nbytes
    return total


def _address_space(needs: Needs) -> Iterator[Shortage]:
    limit = _address_space_limit()
    largest = max(needs.segments, default=0)
    needed = max(FEWEST_BYTES["gpu"] + needs.engine, FEWEST_BYTES["expert"] + largest) + needs.mailbox
    if limit is not None and limit < needed:
        yield Shortage(
            "ulimit -v",
            f"ulimit -v: a process may use {limit // MIB} MiB of address space, one of this model needs "
            f"{-(-needed // MIB)} MiB",
            "Allowed: unlimited, or as much; batch systems: ask for more memory",
        )


def _weights_directory(needs: Needs, found: Volume) -> Iterator[Shortage]:
    missing = sum(
        max(0, nbytes - _size(Path(segment_path(str(found.path), index))))
        for index, nbytes in enumerate(needs.segments)
    )
    if found.free_bytes < missing:
        yield Shortage(
            "expert_weights_dir",
            f"packed experts take {missing / GIB:.2f} GiB more in {found.path}, where "
            f"{found.free_bytes / GIB:.2f} GiB are free",
            f"A larger one (mount -o remount,size=… {found.path}), or smaller experts (--expert-dtype int4)",
        )


def _memory(needs: Needs, root: Path) -> Iterator[Shortage]:
    limit = read_memory_limit(root)
    machine = total_memory(root)
    allowed = machine if limit is None else min(machine, limit)
    needed = sum(needs.segments) + needs.prefixes + needs.mailbox
    if needed > allowed:
        prefixes = f", {needs.prefixes / GIB:.1f} GiB of evicted prefixes" if needs.prefixes else ""
        smaller = "Allowed: less --kv-offload-gib, or --kv-disk-gib in memory. " if prefixes else ""
        whose = "this machine has" if allowed == machine else "the cgroup (container, batch job) allows"
        remedy = (
            "Smaller experts (--expert-dtype int4), experts on disk (--cold-experts disk), on GPUs "
            "(--gpu-experts-ratio), or expert servers on other hosts take less; `moebius plan` says what fits"
        )
        yield Shortage(
            "RAM",
            f"packed experts{prefixes} and mailbox take {needed / GIB:.1f} GiB of RAM, but {whose} "
            f"{allowed / GIB:.1f} GiB",
            f"{smaller}{remedy}",
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
