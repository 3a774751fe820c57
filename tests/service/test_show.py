"""Guards `moebius show` and `pull`: what headers say, from here and from the hub, without the weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from lab.random_model import RandomModelOptions, write_random_model
from tests.helpers.hub_server import hub_server
from tests.service.test_hub import NAME, moebius


def written(directory: Path, weights: str, layers: int = 0) -> Path:
    """Returns a model of random weights: a directory, or a GGUF file."""
    options = RandomModelOptions("small" if layers else "tiny", weights, layers)
    return write_random_model(directory / weights, options, lambda done, total: None).path


def header(file: Path) -> dict[str, Any]:
    """Returns name -> entry of each tensor, as the format's page says."""
    data = file.read_bytes()
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return {name: entry for name, entry in found.items() if name != "__metadata__"}


def shown(url: str, home: Path, *arguments: str) -> dict[str, Any]:
    """Returns what `moebius show --json` says."""
    status, out, err = moebius(url, home, "show", "--json", *arguments)
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_directory_and_the_hub_say_the_same(tmp_path: Path) -> None:
    """Parameters, types and bytes are those of the files; of weights on the hub only
    headers are read, and the licence is the card's."""
    path = written(tmp_path, "bfloat16", 4)
    weights = {file.name for file in path.glob("*.safetensors")}
    tensors = [tensor for name in weights for tensor in header(path / name).items()]
    shapes = {name: tuple(each["shape"]) for name, each in tensors}
    types = Counter(each["dtype"] for _, each in tensors)
    card = b"---\nlicense: apache-2.0\n---\n# Tiny\n"
    (path / "README.md").write_bytes(card)
    here = shown("http://127.0.0.1:1", tmp_path, str(path))
    config = json.loads((path / "config.json").read_text())
    routed = sum(math.prod(shape) for name, shape in shapes.items() if ".mlp.experts." in name)
    assert here["parameters"] == sum(map(math.prod, shapes.values()))
    assert here["routed_parameters"] == routed > 0
    used = routed * config["num_experts_per_tok"] // here["experts"]
    assert here["active_parameters"] == here["parameters"] - routed + used
    assert here["layers"] == config["num_hidden_layers"]
    assert here["licence"] == "apache-2.0"
    assert sum((Counter(kind["types"]) for kind in here["tensors"]), Counter()) == types
    files = {each.name: each.read_bytes() for each in path.iterdir() if each.is_file()}
    with hub_server({NAME: files}) as server:
        there = shown(server.url, tmp_path, NAME)
        assert all(server.sent[name] < len(files[name]) / 2 for name in weights)
    same = here.keys() - {"model", "licence"}
    assert {key: there[key] for key in same} == {key: here[key] for key in same}


def test_quantisations_have_types_and_all_parameters(tmp_path: Path) -> None:
    """GGUF files: blocks count as the weights in them, and only the beginning of a file is read."""
    path = written(tmp_path, "q4_0", 30)
    [file] = path.parent.glob("*.gguf") if path.is_file() else path.glob("*.gguf")
    data = file.read_bytes()
    here = shown("http://127.0.0.1:1", tmp_path, str(file))
    types = sum((Counter(kind["types"]) for kind in here["tensors"]), Counter[str]())
    assert types["Q4_0"] > 30
    assert here["parameters"] > here["routed_parameters"] > here["nbytes"] > len(data) / 2
    with hub_server({NAME: {"small-Q4_0.gguf": data, "small-Q8_0.gguf": b"GGUF"}}) as server:
        there = shown(server.url, tmp_path, f"{NAME}:Q4_0")
        assert server.sent.keys() == {"small-Q4_0.gguf"}
        assert server.sent["small-Q4_0.gguf"] < len(data) / 2
        status, _, err = moebius(server.url, tmp_path, "show", NAME)
        assert (status, f"give one as {NAME}:NAME, of Q4_0, Q8_0" in err) == (2, True)
    assert there | {"model": ""} == here | {"model": ""}
    status, out, _ = moebius("http://127.0.0.1:1", tmp_path, "show", str(file))
    assert (status, "blk.*.ffn_down_exps" in out) == (0, True)


def test_packed_weights_have_no_invented_number(tmp_path: Path) -> None:
    """Elements that hold several weights are not counted as one each."""
    here = shown("http://127.0.0.1:1", tmp_path, str(written(tmp_path, "int4_g32")))
    assert here["parameters"] is here["active_parameters"] is None
    assert here["nbytes"] > 0


def test_pull_downloads_as_serve_does(tmp_path: Path) -> None:
    """The weights are in the hub's cache afterwards, and the place is printed."""
    path = written(tmp_path, "bfloat16")
    files = {each.name: each.read_bytes() for each in path.iterdir() if each.is_file()}
    with hub_server({NAME: files}) as server:
        status, out, err = moebius(server.url, tmp_path, "pull", NAME)
        assert status == 0, err
        assert {each.name: each.read_bytes() for each in Path(out.strip()).iterdir()} == files
        assert f"downloading {NAME}: " in err
