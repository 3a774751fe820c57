"""Invariant: a GGUF model that cannot be served whole is refused, and the message says which part of it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from app.commands.models import with_checkpoint
from gpu_service.loader.load import load_weights
from gpu_service.models.compose import build_model
from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.files import gguf_files, is_gguf, served_name
from moebius.checkpoint.gguf.names import COMMON_RULES, canonical_name
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from moebius.models.checkpoint import open_index
from moebius.models.config import ModelConfigError
from moebius.models.read import read_config, read_model_config
from moebius.models.registry import FAMILIES
from tests.helpers.gguf_files import GgufTypes, write_gguf
from tests.helpers.gguf_models import CASES, GgufFile, cached_gguf_files


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GgufFile]:
    return cached_gguf_files(tmp_path_factory.mktemp("gguf"))


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_index(path)


def small_file(
    path: Path,
    architecture: str = "qwen3moe",
    experts: int = 2,
    kind: int = 0,
    name: str = "token_embd.weight",
) -> Path:
    """Returns one tensor `[2, 32]` whose bytes are of no account."""
    writer = GGUFWriter(path, architecture)
    writer.add_expert_count(experts)
    writer.add_tensor(name, np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if kind:
        # The type's number follows name, axes and sizes.
        content = bytearray(path.read_bytes())
        at = content.index(name.encode()) + len(name) + 4 + 2 * 8
        content[at : at + 4] = kind.to_bytes(4, "little")
        path.write_bytes(content)
    return path


@pytest.mark.parametrize("part", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_a_truncated_file_is_named(part: float, tmp_path: Path, gguf: Callable[[str], GgufFile]) -> None:
    """The error names the file wherever it ends: in the header or in the data."""
    content = gguf("qwen3_moe_tied").path.read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(content[: int(len(content) * part)])
    refused(short, r"short\.gguf (is truncated|cannot be read as GGUF)")


def test_what_is_not_gguf_is_refused(tmp_path: Path) -> None:
    """Another format, another byte order, a version without a description."""
    file = small_file(tmp_path / "m.gguf")
    content = file.read_bytes()
    file.write_bytes(b"GGML" + content[4:])
    refused(file, "is not GGUF")
    file.write_bytes(content[:4] + bytes([0, 0, 0, 3]) + content[8:])
    refused(file, "GGUF of version 50331648")
    refused(tmp_path / "absent.gguf", r"absent\.gguf is missing")


def test_an_unknown_architecture_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    path = small_file(tmp_path / "m.gguf", "gemma3")
    refused(path, "general.architecture is 'gemma3'; allowed: afmoe, bailingmoe3, .*qwen3moe")
    refused(small_file(tmp_path / "k3.gguf", "kimi-k3"), "general.architecture is 'kimi-k3'")
    with pytest.raises(ModelConfigError, match="gemma3"):
        read_model_config(path)
    message = "qwen3moe.expert_count is not above 0; only mixture-of-experts models are served"
    refused(small_file(tmp_path / "dense.gguf", "qwen3moe", 0), message)


def metadata_entry(key: str, kind: int, value: bytes) -> bytes:
    """Returns the metadata entry as a header holds it."""
    return len(key).to_bytes(8, "little") + key.encode() + kind.to_bytes(4, "little") + value


NESTED = ((9).to_bytes(4, "little") + (1).to_bytes(8, "little")) * 2000


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (metadata_entry("a", 9, NESTED), r"at byte \d+ arrays are nested in 4 others; allowed: 3"),
        (metadata_entry("split.no", 8, bytes([1, *[0] * 7]) + b"x"), r"split.no .* are \('x', 1\)"),
        (metadata_entry("split.count", 6, bytes(4)), r"split.no .* are \(0, 0.0\)"),
    ],
)
def test_metadata_of_unexpected_kinds_is_refused(entry: bytes, message: str, tmp_path: Path) -> None:
    """Arrays nested deeper than Python calls go, and numbers that are text, are named, not tracebacks."""
    file = small_file(tmp_path / "m.gguf")
    content = file.read_bytes()
    count = int.from_bytes(content[16:24], "little") + 1
    file.write_bytes(content[:16] + count.to_bytes(8, "little") + entry + content[24:])
    refused(file, message)


def test_a_tensor_with_an_endless_name_is_refused(tmp_path: Path) -> None:
    """A length that is wrong takes what follows for a name: the message does not repeat it."""
    file = small_file(tmp_path / "m.gguf", name="a" * 600)
    refused(file, "a tensor's name of 600 characters before byte [0-9]+; allowed: 512$")


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_K.value, GGMLQuantizationType.I32.value, 99])
def test_an_unknown_type_is_named_with_its_tensor(kind: int, tmp_path: Path) -> None:
    known = {member.value: member.name for member in GGMLQuantizationType}
    message = f"'token_embd.weight' is of GGUF type {known.get(kind, kind)}; allowed: F32, .*Q6_K"
    refused(small_file(tmp_path / "m.gguf", kind=kind), message)


def test_a_table_that_is_not_of_whole_numbers_is_refused(tmp_path: Path) -> None:
    """What a token's id alone chooses are experts' numbers."""
    path = small_file(tmp_path / "m.gguf", "deepseek4", name="blk.0.ffn_gate_tid2eid.weight")
    refused(path, r"'blk.0.ffn_gate_tid2eid.weight' is F32; allowed: I32")


def test_rows_that_blocks_do_not_divide_are_refused(tmp_path: Path) -> None:
    path = small_file(tmp_path / "m.gguf", kind=GGMLQuantizationType.Q6_K.value)
    refused(path, r"'token_embd.weight' of shape \[2, 32\] is Q6_K, which stores rows of multiples of 256")


def test_tensors_that_no_rule_knows_are_listed(tmp_path: Path) -> None:
    """The list has such tensors as factors of a rotary scaling that the metadata does not mention."""
    path = small_file(tmp_path / "m.gguf", name="rope_freqs.weight")
    refused(path, "qwen3moe is not known to have: rope_freqs.weight")


@pytest.mark.parametrize(
    ("left_out", "missing"),
    [
        ("blk.1.attn_k_norm.weight", "model.layers.1.self_attn.k_norm.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ],
)
def test_a_missing_dense_tensor_is_named(
    left_out: str, missing: str, tmp_path: Path, gguf: Callable[[str], GgufFile]
) -> None:
    reference = gguf("qwen3_moe_tied").reference
    path = tmp_path / "m.gguf"
    write_gguf(reference, path, GgufTypes(), leave_out=left_out)
    model = build_model(read_model_config(path))
    with pytest.raises(CheckpointError, match=f"1 missing: {re.escape(missing)}"):
        load_weights(model, path)


@pytest.mark.parametrize(
    ("name", "left_out", "left"),
    [
        ("deepseek_v2", "blk.1.attn_v_b.weight", "blk.1.attn_k_b.weight"),
        ("qwen3_next", "blk.1.attn_gate.weight", "blk.1.attn_qkv.weight"),
    ],
)
def test_half_of_a_projection_is_named(
    name: str, left_out: str, left: str, tmp_path: Path, gguf: Callable[[str], GgufFile]
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(gguf(name).reference, path, GgufTypes(), leave_out=left_out)
    refused(path, f"'{left}' has no counterpart")


@pytest.mark.parametrize(
    ("key", "number", "message"),
    [
        ("ssm.time_step_rank", 3, "ssm.time_step_rank is 3; allowed: a multiple of ssm.group_count"),
        ("ssm.group_count", 0, "ssm.group_count is 0; allowed: an integer >= 1"),
        ("ssm.state_size", 9, r"linear_attn.conv1d.weight \[128, 4\] does not have 132 channels"),
        ("ssm.inner_size", 90, r"linear_attn.conv1d.weight \[128, 4\] does not have 122 channels"),
    ],
)
def test_heads_of_linear_attention_that_do_not_fit_are_named(
    key: str, number: int, message: str, tmp_path: Path, gguf: Callable[[str], GgufFile]
) -> None:
    """Heads in another order could be read as any; sizes have to agree."""
    content, path = gguf("qwen3_5_moe").path.read_bytes(), tmp_path / "m.gguf"
    name = f"qwen35moe.{key}".encode()
    at = content.index(name) + len(name) + 4
    path.write_bytes(content[:at] + number.to_bytes(4, "little") + content[at + 4 :])
    refused(path, message)


def test_parts_are_found_from_any_of_them_and_missed_by_name(
    tmp_path: Path, gguf: Callable[[str], GgufFile]
) -> None:
    """The first part has the metadata; a directory of parts is one model."""
    first = gguf("qwen3_moe").path
    parts = gguf_files(first)
    assert len(parts) > 2
    assert gguf_files(parts[-1]) == parts == gguf_files(first.parent)
    names = set(open_index(first).tensors)
    assert set(open_index(parts[-1]).tensors) == names
    assert read_config(parts[-1]) == read_config(first)
    assert served_name(first) == "qwen3_moe"
    for part in parts:
        shutil.copy(part, tmp_path)
    lost = tmp_path / parts[1].name
    lost.unlink()
    refused(tmp_path, re.escape(f"{lost} is missing"))
    shutil.copy(parts[2], lost)
    refused(
        tmp_path, re.escape(f"{lost} says it is part 3 of {len(parts)}, but its name says 2 of {len(parts)}")
    )


def test_a_directory_is_a_gguf_model_if_it_has_one_and_no_safetensors(tmp_path: Path) -> None:
    """Vision towers next to a model are not a second one; two models have to be distinguished by path."""
    assert not is_gguf(tmp_path)
    model = small_file(tmp_path / "m-Q4_K_M.gguf")
    small_file(tmp_path / "mmproj-m-F16.gguf", "clip")
    assert is_gguf(tmp_path)
    assert gguf_files(tmp_path) == (model,)
    other = small_file(tmp_path / "m-Q8_0.gguf")
    refused(tmp_path, r"2 GGUF models \(m-Q4_K_M\.gguf, m-Q8_0\.gguf\)")
    assert set(open_index(other).tensors) == {"model.embed_tokens.weight"}
    (tmp_path / "model.safetensors").touch()
    assert not is_gguf(tmp_path)


def test_commands_take_a_file_or_a_directory_of_one(gguf: Callable[[str], GgufFile], tmp_path: Path) -> None:
    """Commands fail before anything starts, with the message of what is wrong with the file."""
    for path in (gguf("qwen3_moe").path, gguf("qwen3_moe").path.parent):
        config = MoebiusConfig.model_validate({"model": {"model": str(path)}})
        assert with_checkpoint(config).model.model == str(path)
    wrong = small_file(tmp_path / "m.gguf", "gemma3")
    with pytest.raises(UserError, match=r"m\.gguf.*'gemma3'; allowed"):
        with_checkpoint(MoebiusConfig.model_validate({"model": {"model": str(wrong)}}))


def test_every_rule_says_what_its_example_says() -> None:
    """Each row is reachable: its own example is renamed by it, not by a row before it."""
    for own in ((), *(spec.rules for family in FAMILIES.values() for spec in family.gguf)):
        for rule in own or COMMON_RULES:
            name, wanted = rule.example
            found = canonical_name(own, name)
            assert found is not None
            assert (found.name, found.change) == (wanted, rule.change)


def test_metadata_that_changes_the_function_is_refused(
    tmp_path: Path, gguf: Callable[[str], GgufFile]
) -> None:
    """A kind of rotary scaling that is not known, and a router of another family."""
    content = gguf("glm4_moe").path.read_bytes()
    path = tmp_path / "m.gguf"
    key = b"glm4moe.expert_gating_func"
    at = content.index(key) + len(key) + 4
    path.write_bytes(content[:at] + (1).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(CheckpointError, match="expert_gating_func is 1; allowed: 2 with glm4_moe"):
        read_config(path)
    content = gguf("gpt_oss").path.read_bytes()
    path.write_bytes(content.replace(b"yarn", b"rope"))
    with pytest.raises(CheckpointError, match=r"rope\.scaling\.type is 'rope'; allowed: none, linear, yarn"):
        read_config(path)
    assert CASES["gpt_oss"].changes["rope_parameters"]["rope_type"] == "yarn"
