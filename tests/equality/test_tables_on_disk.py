"""Invariant: tables of n-grams that stay in the checkpoint's files give the same bits as loaded ones, for all
families and files that have them, and a file that can not be read never gives rows.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_service.assembly import tables
from gpu_service.core.parallel import SOLO
from gpu_service.experts.local_client import LocalExpertClient
from gpu_service.layers.ngrams import NGramRows
from gpu_service.loader.load import load_weights, plan_weights
from gpu_service.models.compose import build_model
from moebius.checkpoint.errors import CheckpointError
from moebius.config import ModelConfigSection, MoebiusConfig
from moebius.errors import UserError
from moebius.models.layers.ngrams import ENGRAM_GROUP
from moebius.models.read import read_geometry, read_model_config
from tests.helpers.gguf_files import write_gguf
from tests.helpers.gguf_models import CASES
from tests.helpers.paged_runner import PagedRunner, load_runner
from tests.helpers.tiny_models import TINY_MODELS, TinyModel, write_tiny_model
from tests.helpers.torch_experts import TorchExperts

PROMPT = [3, 17, 200, 5, 99, 42, 3, 17, 200, 5]


def _deepseek(directory: Path) -> Path:
    write_tiny_model(TINY_MODELS["deepseek_v41"], directory, seed=4)
    return directory


def _deepseek_fp8(directory: Path) -> Path:
    """Codes with scales of each row."""
    tiny = TINY_MODELS["deepseek_v41"]
    tiny = replace(tiny, changes=tiny.changes | {"engram_head_dim": 2 * ENGRAM_GROUP})
    write_tiny_model(tiny, directory, seed=4)
    stored = load_file(directory / "model.safetensors")
    for name in [name for name in stored if name.endswith("engram.embed.weight")]:
        codes = stored[name].to(torch.float8_e4m3fn)
        scale = torch.randint(124, 130, (len(codes), 2), generator=torch.Generator().manual_seed(1))
        stored |= {name: codes, name.replace("weight", "scale"): scale.to(torch.uint8)}
    save_file(stored, directory / "model.safetensors")
    return directory


def _qwen(directory: Path) -> Path:
    """A table in several parts."""
    write_tiny_model(TINY_MODELS["qwen4_exp"], directory, seed=5)
    return directory


def _qwen_fp8(directory: Path) -> Path:
    """Codes with one scale."""
    _qwen(directory)
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    parts = [name for name in tensors if ".ngram_embedding.shard_" in name]
    tensors |= {part: (tensors[part] / 0.02).to(torch.float8_e4m3fn) for part in parts}
    save_file(tensors | {f"{parts[0].partition('shard_')[0]}weight_scale": torch.tensor([0.02])}, file)
    return directory


def _gguf(directory: Path, table: str) -> Path:
    case = CASES["qwen4_exp"]
    directory.mkdir()
    reference = write_tiny_model(TinyModel(case.model_type, case.changes), directory / "hf", seed=1)
    write_gguf(reference, directory / "model.gguf", replace(case.types, other=table))
    return directory / "model.gguf"


MODELS: dict[str, Callable[[Path], Path]] = {
    "deepseek_v41": _deepseek,
    "deepseek_v41-fp8": _deepseek_fp8,
    "qwen4_exp": _qwen,
    "qwen4_exp-fp8": _qwen_fp8,
    "gguf-F16": lambda directory: _gguf(directory, "F16"),
    "gguf-Q8_0": lambda directory: _gguf(directory, "Q8_0"),
}


def _tables(runner: PagedRunner) -> list[NGramRows]:
    return [module for module in runner.model.modules() if isinstance(module, NGramRows)]


def _runner(path: Path, in_files: bool) -> PagedRunner:
    experts = None
    if path.is_file():
        experts = LocalExpertClient(str(path), read_geometry(path), torch.float32)
    return load_runner(path, experts=experts, in_files=in_files)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_the_same_bit_for_bit(name: str, tmp_path: Path) -> None:
    """A prompt in chunks and tokens one by one; a row that was read lately is not read again."""
    path, outputs, answers = MODELS[name](tmp_path / "model"), [], []
    for in_files in (False, True):
        runner = _runner(path, in_files)
        decoding, logits = runner.prefill(PROMPT, chunk=4)
        outputs.append(logits)
        answers.append(runner.greedy([decoding], logits[-1:], 6))
    assert torch.equal(*outputs)
    assert answers[0] == answers[1]
    found = _tables(runner)
    assert found
    for table in found:
        assert table.files is not None
        assert len(table.weight) == 0
        read, kept = table.files.reader.counters
        assert 0 < read <= table.files.reader.num_rows
        assert kept > 0, "the prompt repeats itself"
    chosen = ModelConfigSection(model=str(path), embedding_tables="disk")
    planned = plan_weights(chosen, runner.model.config, SOLO, torch.device("cpu"))
    sizes = [sum(one.row_bytes for one in table.files.tensors) + 96 for table in found if table.files]
    rows = [table.files.reader.num_rows for table in found if table.files]
    assert planned.table_bytes == sum(size * count for size, count in zip(sizes, rows, strict=True))


def test_a_file_that_ends_too_early_gives_no_rows(tmp_path: Path) -> None:
    """The step fails with the file's name. The reference's experts map another one."""
    path = shutil.copytree(_qwen(tmp_path / "experts"), tmp_path / "model")
    runner = load_runner(path, experts=TorchExperts(tmp_path / "experts"), in_files=True)
    (file,) = path.glob("*.safetensors")
    os.truncate(file, 100)
    with pytest.raises(CheckpointError, match=rf"{file.name} at byte \d+, where rows of a table lie, ended"):
        runner.prefill(PROMPT)
    with pytest.raises(CheckpointError):
        load_weights(build_model(runner.model.config), path, in_files=True)


def test_auto_is_what_free_memory_allows(tmp_path: Path) -> None:
    """On a CPU alone: a GPU reads tables in RAM."""
    model = read_model_config(_qwen(tmp_path))
    config = MoebiusConfig(model=ModelConfigSection(model=str(tmp_path)))
    cpu, gpu = torch.device("cpu"), torch.device("meta")

    def chosen(device: torch.device, free: int) -> str:
        return tables.with_tables(config, model, [SOLO], device, free).model.embedding_tables

    needed = plan_weights(config.model, model, SOLO, cpu).device_bytes + 2**30
    assert chosen(cpu, needed) == "ram"
    assert chosen(cpu, needed - 1) == "disk"
    assert chosen(gpu, needed - 1) == "ram"
    on_disk = config.model.model_copy(update={"embedding_tables": "disk"})
    with pytest.raises(UserError, match="allowed beside a GPU: auto, ram"):
        tables.with_tables(config.model_copy(update={"model": on_disk}), model, [SOLO], gpu, needed)
