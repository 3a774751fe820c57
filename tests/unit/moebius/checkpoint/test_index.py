"""Guards reading safetensors: every slice equals numpy's, and every defect is named with its file."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.index import TensorInfo
from moebius.checkpoint.reader import SliceReader, read_slice
from moebius.models.checkpoint import open_index
from tests.helpers.checkpoints import Array, TinyMoe, write_safetensors


def test_reads_what_the_reference_library_writes(tmp_path: Path) -> None:
    """Our header reading agrees with the safetensors library, also for a scalar and an empty tensor."""
    tensors: dict[str, Array] = {
        "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
        "halves": np.arange(6, dtype=np.float16),
        "scalar": np.array(7, dtype=np.int64),
        "empty": np.zeros((0, 5), np.float32),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    index = open_index(tmp_path)
    assert set(index.tensors) == set(tensors)
    with SliceReader() as reader:
        for name, expected in tensors.items():
            found = reader.read(index[name])
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


def test_shards_hold_together(tmp_path: Path) -> None:
    """The union of the shards is the checkpoint, each tensor found in its own file."""
    model = TinyMoe(shards=4)
    index = open_index(model.write(tmp_path / "model"))
    with SliceReader() as reader:
        for name, expected in model.tensors().items():
            np.testing.assert_array_equal(reader.read(index[name]), expected)


bounds = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3))


@pytest.fixture(scope="module")
def stack_of_matrices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Array, TensorInfo]]:
    """A stored stack `[3, 9, 9]`; blocks are three rows high, so that their borders are crossed."""
    directory = tmp_path_factory.mktemp("stack")
    stack = np.arange(3 * 9 * 9, dtype=np.float32).reshape(3, 9, 9)
    write_safetensors(directory / "model.safetensors", {"stack": stack})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moebius.checkpoint.reader.BLOCK_BYTES", 3 * 9 * 4)
        yield stack, open_index(directory)["stack"]


@given(rows=bounds, cols=bounds, stack_index=st.integers(0, 2))
def test_slices_equal_numpy(
    stack_of_matrices: tuple[Array, TensorInfo],
    rows: tuple[int, ...],
    cols: tuple[int, ...],
    stack_index: int,
) -> None:
    """Any rows and columns of any matrix of a stack."""
    stack, info = stack_of_matrices
    found = read_slice(info, slice(*rows), slice(*cols), stack_index)
    np.testing.assert_array_equal(found, stack[stack_index][slice(*rows), slice(*cols)])


def test_slice_past_the_end_is_refused(tmp_path: Path) -> None:
    """numpy would clip it, and a slice of the wrong size would go unnoticed."""
    write_safetensors(tmp_path / "model.safetensors", {"w": np.zeros((4, 5), np.float32)})
    info = open_index(tmp_path)["w"]
    for rows, cols in ((slice(0, 5), None), (None, slice(2, 6)), (slice(6, 6), None)):
        with pytest.raises(CheckpointError, match="'w'"):
            read_slice(info, rows, cols)
    with pytest.raises(CheckpointError, match="no matrix 0"):
        read_slice(info, stack_index=0)


def test_missing_things_are_named(tmp_path: Path) -> None:
    """A directory, a file, a shard, a tensor."""
    with pytest.raises(CheckpointError, match="nowhere"):
        open_index(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        open_index(tmp_path)
    model = TinyMoe(shards=2).write(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"'model\.absent' is missing"):
        open_index(model)["model.absent"]
    (model / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.* is missing"):
        open_index(model)


def test_promised_tensor_must_be_in_its_shard(tmp_path: Path) -> None:
    """An index file that names a tensor its shard lacks, or a path outside the directory."""
    model = TinyMoe(shards=2).write(tmp_path / "model")
    path = model / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    path.write_text(json.dumps({"weight_map": {**weight_map, "extra": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match="'extra' is not in"):
        open_index(model)
    path.write_text(json.dumps({"weight_map": {"w": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="plain file name"):
        open_index(model)
    path.write_text("[")
    with pytest.raises(CheckpointError, match="is not JSON"):
        open_index(model)


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({**ENTRY, "dtype": "Q9"}, "dtype 'Q9'"),
        ({**ENTRY, "shape": [2, 3]}, "needs 24"),
        ({**ENTRY, "data_offsets": [16, 32]}, "truncated"),
        ({**ENTRY, "shape": None}, "malformed"),
        ({**ENTRY, "shape": [2, float("inf")]}, "malformed"),
        ({**ENTRY, "shape": [2.5, 2]}, "malformed"),
        ({**ENTRY, "shape": ["2", "2"]}, "malformed"),
        ({**ENTRY, "data_offsets": [0, True]}, "malformed"),
        ({**ENTRY, "dtype": ["F32"]}, "malformed"),
        ({**ENTRY, "dtype": "Q" * 5000}, r"dtype 'QQQ+\.\.\.Q+'"),
        ({"dtype": "F32"}, "malformed"),
        ([], "malformed"),
    ],
)
def test_bad_header_entry_names_file_and_tensor(tmp_path: Path, entry: object, complaint: str) -> None:
    """Nothing of a broken header is believed."""
    raw = json.dumps({"bad.weight": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16))
    with pytest.raises(CheckpointError, match=complaint) as caught:
        open_index(tmp_path)
    assert "model.safetensors" in str(caught.value)
    assert "bad.weight" in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"abc", (2**40).to_bytes(8, "little"), bytes([2, *[0] * 7]) + b"[]"]
)
def test_what_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    """Empty, short, absurd header length, header of another kind."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_index(tmp_path)


def test_headers_are_read_once_while_in_use(tmp_path: Path) -> None:
    """What is open is shared; files that were written since, or that came, are read again, and so is a
    checkpoint that nothing refers to any more.
    """
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"one": np.zeros(3, np.float32)})
    first = open_index(tmp_path)
    assert open_index(tmp_path) is first
    os.utime(file, ns=(1, 1))
    again = open_index(tmp_path)
    assert again is not first
    assert again.tensors == first.tensors
    replaced = tmp_path / "new"
    write_safetensors(replaced, {"two": np.zeros(3, np.float32)})
    replaced.rename(file)
    assert list(open_index(tmp_path).tensors) == ["two"]
    gone = weakref.ref(open_index(tmp_path))
    gc.collect()
    assert gone() is None
