"""Guards what the digests of a model's files find, and what they are not to find."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from gateway.text.model_files import ReadFiles, read_files
from gpu_service.assembly.identity import read_identity
from moebius.checkpoint.errors import CheckpointError
from moebius.config import MoebiusConfig
from moebius.errors import StartupError, WrongIdentity
from moebius.models.checkpoint import open_index
from moebius.models.identity import (
    ABSENT,
    MODEL_FILES,
    TEMPLATE_FILE,
    IdentityRecord,
    changes,
    check_unchanged,
    checkpoint_parts,
    expert_fingerprint,
    expert_parts,
    file_digest,
    identity_digest,
    identity_part,
    identity_parts,
    identity_text,
    model_parts,
    text_parts,
    weight_parts,
)
from tests.drills.checkpoint import write_checkpoint
from tests.helpers.checkpoints import TinyMoe
from tests.helpers.swapped_files import swap_tokens

# Files of the tiny model that are there; all others are looked for, too.
_HELD = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Returns a tiny checkpoint with a tokenizer."""
    return write_checkpoint(tmp_path / "model")


def config_of(model: Path, record: Path | None = None) -> MoebiusConfig:
    section = {"model": str(model), "identity_file": str(record or "")}
    return MoebiusConfig.model_validate({"model": section})


def change(file: Path) -> None:
    """Another content of the same size, or a file that was not there."""
    if not file.exists():
        file.write_text("{}")
        return
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", MODEL_FILES)
def test_every_file_that_makes_an_answer_counts(model: Path, name: str) -> None:
    """One that changes, appears or goes is named, and nothing else is; the digest is another one."""
    whole = read_identity(config_of(model))
    before = whole.parts
    assert (before[name] == ABSENT) == (name not in _HELD)
    if name == "config.json":  # nothing could be read of a broken one
        content = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**content, "note": 1}))
    else:
        change(model / name)
    after = read_identity(config_of(model))
    assert after.digest != whole.digest
    words = changes(before, after.parts)
    assert words == f"{name} {'has changed' if name in _HELD else 'is new'}"
    (model / name).unlink()
    assert changes(before, model_parts(model)) == (f"{name} is missing" if name in _HELD else "")


def test_copies_links_and_touched_files_are_the_same(model: Path, tmp_path: Path) -> None:
    """Hosts have copies, the hub's cache has links, and network file systems have times of their own."""
    before = read_identity(config_of(model))
    copied, linked = tmp_path / "copied", tmp_path / "snapshot"
    shutil.copytree(model, copied)
    linked.mkdir()
    for file in copied.iterdir():
        os.utime(file, (1, 1))
        (linked / file.name).symlink_to(file)
    for other in (copied, linked):
        found = read_identity(config_of(other))
        assert (found.parts, found.digest) == (before.parts, before.digest)
    (linked / "tokenizer.json").unlink()
    swap_tokens(copied / "tokenizer.json")
    (linked / "tokenizer.json").symlink_to(copied / "tokenizer.json")
    assert changes(before.parts, text_parts(linked)) == "tokenizer.json has changed"


def test_one_dense_tensor_changed_in_place_is_noticed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However sparsely a large file is sampled: of each there is a block."""
    monkeypatch.setattr("moebius.models.identity._BLOCK", 8)
    monkeypatch.setattr("moebius.models.identity._BLOCKS", 4)
    index = open_index(model)
    before = weight_parts(index)
    for name, info in index.tensors.items():
        content = info.file.read_bytes()
        changed = bytearray(content)
        changed[info.offset + (info.nbytes - 8) // 2] ^= 1
        info.file.write_bytes(changed)
        is_dense = "expert" not in name
        assert not is_dense or weight_parts(index) != before, name
        info.file.write_bytes(content)


def test_a_header_alone_is_noticed(model: Path) -> None:
    """Two tensors of one shape change places: no weight differs, nor does the size."""
    before = checkpoint_parts(open_index(model))
    file = model / "model.safetensors"
    content = file.read_bytes()
    one, two = b'layers.0.input_layernorm"', b'layers.1.input_layernorm"'
    one, two = (text.replace(b'"', b".weight") for text in (one, two))
    assert content.count(one) == content.count(two) == 1
    swapped = content.replace(one, b"\0" * len(one)).replace(two, one).replace(b"\0" * len(one), two)
    file.write_bytes(swapped)
    assert changes(before, checkpoint_parts(open_index(model))) == "model.safetensors has changed"


def test_gguf_has_its_tokenizer_in_its_header(tmp_path: Path) -> None:
    """A gateway of a GGUF model reads the header; what an expert server reads has no names of files."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(100))
    before = text_parts(file)
    change(file)
    assert changes(before, text_parts(file)) == "GGUF header has changed"
    assert changes(before, {"tokenizer.json": "00"}) == "tokenizer.json is new"


def test_experts_from_another_checkpoint(model: Path, tmp_path: Path) -> None:
    """Names of both do not get into one another's way; the fingerprint is that of the experts."""
    other = TinyMoe(family="glm4_moe").write(tmp_path / "experts")
    parts = expert_parts(open_index(other), model, str(other))
    assert expert_fingerprint(parts) == checkpoint_parts(open_index(other))["checkpoint"]
    assert parts["config.json"] == file_digest(model / "config.json")
    config = config_of(model)
    section = config.model.model_copy(update={"expert_checkpoint": str(other)})
    engine = read_identity(config.model_copy(update={"model": section})).parts
    assert changes(engine, parts) == changes(parts, engine) == ""
    assert engine["checkpoint"] != engine["expert_checkpoint/checkpoint"]


def test_text_and_digest() -> None:
    """Identities travel as lines that other services read without this module."""
    parts = {"a=b.json": "00", "checkpoint": "11"}
    text = identity_text(parts)
    assert identity_parts(text) == parts
    assert (identity_part(text, "checkpoint"), identity_part(text, "c")) == ("11", "")
    assert len(identity_digest(text)) == 32
    assert identity_digest("") == ""
    assert changes(parts, {"checkpoint": "12"}) == "the checkpoint has changed"
    many = {f"{number}.safetensors": "0" for number in range(20)}
    assert changes(many, dict.fromkeys(many, "1")).endswith("4.safetensors has changed, 15 more")


def test_the_first_reader_notes_and_all_later_ones_compare(tmp_path: Path) -> None:
    """The first reader of a part writes it; a refused process changes nothing; an operator may."""
    path = tmp_path / "identity.json"
    IdentityRecord(str(path)).check({"a": "1", TEMPLATE_FILE: "5"})
    IdentityRecord(str(path)).check({"a": "1", "b": ABSENT})
    for _ in range(2):
        with pytest.raises(WrongIdentity, match=r"^a has changed, b is new since the engine was started"):
            IdentityRecord(str(path)).check({"a": "2", "b": "3", "c": "4"})
    assert IdentityRecord(str(path)).refusal().startswith("a has changed, b is new since the engine")
    with pytest.raises(WrongIdentity, match=r"^a is missing since"):
        IdentityRecord(str(path)).check({"a": ABSENT})
    assert IdentityRecord(str(path)).refusal().startswith("b is new, a is missing since")
    IdentityRecord(str(path)).check({"a": "1", "b": ABSENT})
    assert IdentityRecord(str(path)).refusal() == IdentityRecord("").refusal() == ""
    IdentityRecord(str(path)).replace({TEMPLATE_FILE: "6"})
    IdentityRecord(str(path)).check({"a": "1", TEMPLATE_FILE: "6"})
    IdentityRecord("").check({"a": "2"})
    for damaged in ("{", "{}", "[]"):
        path.write_text(damaged)
        with pytest.raises(StartupError, match=r"identity_file: .*no record"):
            IdentityRecord(str(path)).check({"a": "1"})


def test_many_readers_at_once(tmp_path: Path) -> None:
    """Processes start together: of two contents one is refused, however they come."""
    path, refused = tmp_path / "identity.json", []

    def read(value: str) -> None:
        try:
            IdentityRecord(str(path)).check({"a": value})
        except WrongIdentity:
            refused.append(value)

    threads = [threading.Thread(target=read, args=(str(number % 2),)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 8
    assert len(set(refused)) == 1


def test_what_is_written_while_it_is_read_is_refused(model: Path) -> None:
    """A file is refused that a download still writes."""
    identity = read_identity(config_of(model))
    identity.confirm()
    change(model / "generation_config.json")
    with pytest.raises(WrongIdentity, match=r"generation_config\.json has changed while it was read"):
        identity.confirm()
    with pytest.raises(WrongIdentity):
        check_unchanged(identity.parts, lambda: model_parts(model))


def test_a_gateway_compares_with_everybody(model: Path, tmp_path: Path) -> None:
    """With the record, with the first process of its port, with the engine, whose files may lie elsewhere."""
    record = tmp_path / "identity.json"
    engine = read_identity(config_of(model, record))
    mine = shutil.copytree(model, tmp_path / "mine")
    files = read_files(str(mine), "", str(record), {})
    files.check_engine(engine.text)
    files.check_engine("")
    swap_tokens(mine / "tokenizer.json")
    with pytest.raises(WrongIdentity, match=r"^tokenizer.json has changed since the engine was started"):
        read_files(str(mine), "", str(record), {})
    with pytest.raises(WrongIdentity, match=r"^tokenizer.json has changed since the gateway was started"):
        read_files(str(mine), "", "", files.parts)
    other: ReadFiles = read_files(str(mine), "", "", {})
    with pytest.raises(WrongIdentity, match=r"^tokenizer.json has changed since the engine.*another one"):
        other.check_engine(engine.text)


def test_a_template_of_the_gateways_own_is_compared_among_gateways(model: Path, tmp_path: Path) -> None:
    """The engine knows nothing of it; that of the checkpoint is not read then."""
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    engine, record = read_identity(config_of(model)), str(tmp_path / "identity.json")
    files = read_files(str(model), str(template), record, {})
    (model / "chat_template.jinja").write_text("{{ messages }}")
    read_files(str(model), str(template), record, files.parts).check_engine(engine.text)
    template.write_text("{{ messages[0] }}")
    with pytest.raises(WrongIdentity, match="--chat-template has changed since"):
        read_files(str(model), str(template), record, {})


def test_unreadable_files_are_named(model: Path) -> None:
    """A directory in a file's place, say."""
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        text_parts(model)
