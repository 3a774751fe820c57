"""Invariant: what assumes an NVIDIA GPU is in few places, and in ever fewer: GPUs of others come next."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.unit.repository.test_structure import parsed, sources

PACKAGES = ("gateway", "gpu_service", "expert_service", "moebius", "app")
# Where a vendor's names belong.
OF_A_VENDOR = ("gpu_service/device/", "gpu_service/ops/", "gpu_service/experts/doorbell/")
_NAME = re.compile(r"cuda|nvidia|nvml|cublas|cudnn", re.IGNORECASE)
# Files that still do. The list only shrinks: what is new asks `gpu_service/device`.
STILL = {
    # Finding GPUs, and what a plan or a report says of them.
    "app/bench/bounds.py",
    "app/cli_options.py",
    "app/doctor/checks.py",
    "app/doctor/facts.py",
    "app/doctor/machine_checks.py",
    "app/option_hints.py",
    "app/planning/fill.py",
    "app/planning/gpu_models.py",
    "app/planning/hardware.py",
    "app/planning/measured_hosts.py",
    "app/planning/rings.py",
    "app/supervisor/placement.py",
    # Mostly comparisons of `device.type`, and streams and events that are torch's own.
    "gpu_service/assembly/build.py",
    "gpu_service/assembly/elastic.py",
    "gpu_service/assembly/experts.py",
    "gpu_service/assembly/kv_tiers.py",
    "gpu_service/assembly/placement.py",
    "gpu_service/assembly/process.py",
    "gpu_service/assembly/rank_plan.py",
    "gpu_service/assembly/steps.py",
    "gpu_service/assembly/warm_up.py",
    "gpu_service/attention/flashinfer_plan.py",
    "gpu_service/attention/registry.py",
    "gpu_service/attention/torch_reference.py",
    "gpu_service/cache/tiers/payloads.py",
    "gpu_service/engine/decode_graphs.py",
    "gpu_service/engine/prompt_graphs.py",
    "gpu_service/engine/sampler.py",
    "gpu_service/experts/adaptive/exchange.py",
    "gpu_service/experts/factory.py",
    "gpu_service/experts/fetching/make.py",
    "gpu_service/experts/fetching/triton_kernels.py",
    "gpu_service/experts/recorder.py",
    "gpu_service/experts/resident/make.py",
    "gpu_service/experts/resident/watch.py",
    "gpu_service/experts/streaming/make.py",
    "gpu_service/experts/streaming/ring.py",
    "gpu_service/experts/streaming/source.py",
    "gpu_service/layers/ngrams.py",
    "gpu_service/memory/device_memory.py",
    "gpu_service/memory/plan.py",
    "gpu_service/parallel/group.py",
    "gpu_service/server/profiler.py",
    "gpu_service/vision/features.py",
    # Values of settings, and options and parts of other servers.
    "gateway/app/sleep_routes.py",
    "moebius/config/__init__.py",
    "moebius/other_servers/llama_cpp.py",
    "moebius/other_servers/values.py",
    "moebius/other_servers/variables.py",
    "moebius/other_servers/vllm_sglang.py",
}


def _docstrings(tree: ast.Module) -> set[int]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr):
            found.add(id(node.body[0].value))
    return found


def _mentions(path: Path) -> Iterator[str]:
    """Yields modules, attributes and strings of a file that name a vendor; docstrings and comments may."""
    tree = parsed(path)
    skipped = _docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names]
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            yield from filter(_NAME.search, modules)
        elif isinstance(node, ast.Attribute) and _NAME.search(node.attr):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield from _NAME.findall(node.value)


def test_few_files_assume_a_vendor() -> None:
    """No file outside `OF_A_VENDOR` names one but those of `STILL`, which has no file that does not."""
    found = {
        path.as_posix()
        for path in sources()
        if path.parts[0] in PACKAGES
        and path.suffix == ".py"
        and not path.as_posix().startswith(OF_A_VENDOR)
        and any(_mentions(path))
    }
    assert found - STILL == set(), "these assume NVIDIA: ask gpu_service/device, or ops, instead"
    assert STILL - found == set(), "these do not any more: take them from the list"


def test_a_mention_is_found(tmp_path: Path) -> None:
    """Imports, attributes and strings count; comments and docstrings do not."""
    file = tmp_path / "file.py"
    file.write_text(
        '"""CUDA."""\nimport torch\n# NVIDIA\nfrom cuda import x\na = torch.cuda.y\nb = "cuda:0"\n'
    )
    assert list(_mentions(file)) == ["cuda", "cuda", "cuda"]
