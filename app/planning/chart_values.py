"""Values of the Helm chart (`k8s/chart`) for a plan: its own numbers, rounded up to MiB."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from app.planning.capacity import CapacityPlan
from app.planning.dense import with_dense_choice
from app.planning.memory import EXPERT_BYTES, MIB, RAM, segment_bytes
from moebius.config import MoebiusConfig
from moebius.config.loader import leaves
from moebius.errors import UserError
from moebius.models.served import read_served_geometry

# CPUs of the gateway, and of each rank that drives a GPU: a thread that launches, one that answers.
GATEWAY_CPUS, RANK_CPUS = 2, 2
# The engine's share of the CPUs of a machine without GPUs.
ENGINE_SHARE = 4
# What NCCL and torch want of /dev/shm, for each rank of several.
RANK_SHM_MIB = 512
HEADROOM_MIB = 64
SECTIONS = ("model", "images", "gpu", "experts", "placement")
# The chart writes these from its other values.
OWNED = {
    "model",
    "served_model_name",
    "device",
    "gpu_address",
    "gpu_metrics_port",
    "expert_transport",
    "expert_split",
    "expert_servers",
    "split_index",
    "split_count",
    "split_shares",
    "numa_node",
    "expert_threads",
    "expert_address",
    "expert_addresses",
    "expert_metrics_port",
    "expert_weights_dir",
    "mailbox",
}


def chart_values(config: MoebiusConfig, plan: CapacityPlan) -> dict[str, Any]:
    """Returns what `helm install --values` takes; a claim for the checkpoint has to be named in addition.

    Raises UserError for a plan that is no Pod's: with expert servers elsewhere.
    """
    if config.experts.expert_addresses:
        raise UserError(
            "--values does not support expert_addresses; for expert servers on other hosts set "
            "experts.mode: remote in the chart"
        )
    gpus, ranks = plan.hardware.gpus, int(plan.settings["tensor_parallel_size"])
    stages = int(plan.settings["pipeline_parallel_size"])
    mailbox = sum(part.nbytes for part in plan.components if part.part == "mailbox")
    engine = {
        "gpus": ranks * stages if gpus else 0,
        "tensorParallel": ranks,
        "pipelineParallel": stages,
        "cpus": _engine_cpus(plan, ranks * stages),
        "memoryMiB": _mib(_engine_bytes(plan) + mailbox) + HEADROOM_MIB,
    }
    found = {
        "model": {"name": plan.model, "path": Path(config.model.model).name},
        "engine": engine,
        "experts": _experts(config, plan, int(str(engine["cpus"])), mailbox),
        "shmMiB": _mib(mailbox) + HEADROOM_MIB + (RANK_SHM_MIB * ranks * stages if ranks * stages > 1 else 0),
    }
    settings = _settings(config, plan)
    if settings:
        found["config"] = settings
    return found


def _experts(config: MoebiusConfig, plan: CapacityPlan, engine_cpus: int, mailbox: int) -> dict[str, Any]:
    parts = {part.part: part.nbytes for part in plan.components if part.place == RAM}
    held = [name for name in parts if name.startswith("experts of server")]
    if not held:
        return {"mode": "none"}
    geometry = read_served_geometry(config)
    sizes = [_mib(nbytes) for nbytes in segment_bytes(_with_residents(config, plan), geometry, len(held))]
    # Read from the checkpoint one after the other, by every thread one.
    each = EXPERT_BYTES + mailbox + parts.get("source experts while loading", 0) // len(held)
    cpus = max(1, (plan.hardware.cores - engine_cpus - GATEWAY_CPUS) // len(held))
    numbers = [
        {"cpus": cpus, "memoryMiB": size + max(_mib(each), 256) + HEADROOM_MIB, "weightsMiB": size + size % 2}
        for size in sizes
    ]
    largest = max(numbers, key=lambda one: one["weightsMiB"])
    found: dict[str, Any] = {
        "mode": "pod",
        "servers": len(held),
        "split": config.experts.expert_split,
        **largest,
    }
    if config.experts.split_shares:
        found["shares"] = list(config.experts.split_shares)
    if any(one != largest for one in numbers):
        found["overrides"] = numbers
    return found


def _engine_cpus(plan: CapacityPlan, ranks: int) -> int:
    return RANK_CPUS * ranks if plan.hardware.gpus else max(RANK_CPUS, plan.hardware.cores // ENGINE_SHARE)


def _engine_bytes(plan: CapacityPlan) -> int:
    """Returns the bytes of all ranks, in RAM."""
    return sum(
        part.nbytes for part in plan.components if part.place == RAM and part.part.startswith("engine")
    )


def _with_residents(config: MoebiusConfig, plan: CapacityPlan) -> MoebiusConfig:
    """Returns the settings with as many experts on GPUs as the plan has put there, in RAM as often as the
    plan counts them, with as many outputs at once as it left them room for, the RAM for prefixes, and what it
    decided of dense weights.
    """
    update: dict[str, Any] = {"drop_resident": plan.drop_resident}
    if plan.residency.is_filled:
        update["gpu_experts"] = max(plan.residency.by_layer.values())
    chosen = {
        "max_num_seqs": plan.max_num_seqs or config.gpu.max_num_seqs,
        "kv_offload_gib": plan.kv_offload_gib or config.gpu.kv_offload_gib,
    }
    gpu = config.gpu.model_copy(update=chosen)
    placement = config.placement.model_copy(update=update)
    chosen_config = with_dense_choice(config, plan.dense)
    return chosen_config.model_copy(update={"placement": placement, "gpu": gpu})


def _settings(config: MoebiusConfig, plan: CapacityPlan) -> dict[str, dict[str, Any]]:
    """What was set, or planned, and is not decided by the chart."""
    tree = _with_residents(config, plan).model_dump(mode="json")
    found: dict[str, dict[str, Any]] = {}
    for leaf in leaves():
        value = tree[leaf.section][leaf.name]
        changed = value != (list(leaf.default) if leaf.is_list else leaf.default)
        if leaf.section in SECTIONS and leaf.name not in OWNED and changed:
            found.setdefault(leaf.section, {})[leaf.name] = value
    if plan.residency.is_everything:
        # experts.mode none says so.
        found.pop("placement", None)
    if layers := plan.settings.get("pipeline_layers"):
        found["parallel"] = {"pipeline_layers": [int(count) for count in layers.split(",")]}
    return found


def _mib(nbytes: float) -> int:
    return -int(-nbytes // MIB)


def write_values(path: Path, values: Mapping[str, Any], headline: str) -> None:
    """Writes the values as YAML, with a comment that says what it was made of. Raises UserError."""
    text = "".join(f"# {line}\n" for line in headline.splitlines())
    text += "# To be added: where the checkpoint is, for example --set model.source.pvc.claimName=models\n"
    try:
        path.write_text(text + yaml.safe_dump(dict(values), sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--values {path}: {error.strerror}") from None
