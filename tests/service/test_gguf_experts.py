"""Invariant: expert servers compute what a GGUF file means, whatever its types and however it is divided."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, quants
from structlog.testing import capture_logs

from expert_service.host import ExpertHost
from moebius.checkpoint.gguf import kept, tensors
from moebius.checkpoint.gguf.files import gguf_files
from moebius.checkpoint.gguf.schemes import KEPT_SCHEMES
from moebius.checkpoint.split import split_bounds
from moebius.models.expert_checkpoint import ExpertCheckpoint
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry
from tests.helpers.gguf_models import GgufFile, cached_gguf_files, reference_logits
from tests.helpers.paged_runner import load_runner
from tests.service.test_expert_loading_formats import distance, golden, host_of, loaded_of, rows_of
from tests.tolerances import EXPERTS_FLOAT32, EXPERTS_GGUF_BFLOAT16, LOGITS_FLOAT32_VS_TRANSFORMERS

# What its experts are packed as.
PACKED = {
    "mixtral": "int4_g32_f16",
    "qwen3_moe": "int4_g32_mins_products, int4_g32_mins_products/int6_g16_products",
    "minimax_m2": "int4_g32_mins/int8_g32_f16",
    "olmoe": "int8_g32_f16+int4_g32_f16/int8_g32_f16",
    "deepseek_v3": "int5_g32_mins_products/iq3_s_grid_products",
    "glm4_moe": "int4_g32_f16/int8_g32_f16",
    "glm_moe_dsa": "int4_g32_f16/int8_g32_f16",
    "qwen3_5_moe": "int4_g32_f16/int8_g32_f16",
    "dots1": "iq4_g32_products/iq3_xxs_grid_products",
}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GgufFile]:
    return cached_gguf_files(tmp_path_factory.mktemp("gguf"))


def decoded(path: Path, geometry: MoeGeometry) -> dict[tuple[int, int, str], np.ndarray[Any, Any]]:
    """Returns float32 weights by (layer, expert, matrix), as the package `gguf` decodes them."""
    weights: dict[tuple[int, int, str], np.ndarray[Any, Any]] = {}
    for part in gguf_files(path):
        for tensor in GGUFReader(part).tensors:
            _, layer, *rest = f"{tensor.name}..".split(".")
            if not rest[0].endswith("_exps"):
                continue
            matrix = rest[0].split("_")[1]
            for expert, values in enumerate(quants.dequantize(tensor.data, tensor.tensor_type)):
                weights[int(layer), expert, matrix] = values
    # A block for multi-token prediction has experts as well.
    assert len(weights) >= len(geometry.moe_layers) * geometry.num_experts * 3
    return weights


@pytest.mark.parametrize("name", sorted(PACKED))
def test_servers_compute_the_decoded_weights(name: str, gguf: Callable[[str], GgufFile]) -> None:
    """Whole, by intermediate channels over several servers (cuts inside blocks of 256 as well), and by
    experts.
    """
    path = gguf(name).path
    geometry = read_geometry(path)
    layers = {geometry.moe_layers[0], geometry.moe_layers[-1]}
    checkpoint = ExpertCheckpoint.open(str(path), geometry)
    assert not any(checkpoint.expert(layer, 0).is_rounded for layer in layers)
    weights, rows = decoded(path, geometry), rows_of(geometry)
    wanted = {layer: golden(weights, layer, *rows) for layer in layers}
    divisions: list[dict[str, Any]] = [{}, {"split": "expert", "split_count": 2}]
    if name in ("qwen3_moe", "dots1"):
        # Groups stay whole, and other models have one; blocks of 256 may be cut, as those that are decoded.
        divisions.append({"split_count": 2, "split_shares": (3, 5)})
    for division in divisions:
        count = division.get("split_count", 1)
        hosts = [host_of(path, **division, split_index=index) for index in range(count)]
        for layer in layers:
            total = np.asarray(sum(host.forward(layer, *rows) for host in hosts))
            assert distance(total, wanted[layer]) < EXPERTS_FLOAT32, division
        for host in hosts:
            loaded = loaded_of(host)
            assert loaded.weight_format == PACKED[name]
            assert not any(loaded.relative_errors.values())


@pytest.mark.parametrize(("name", "rounds"), [("olmoe", True), ("olmoe", False), ("qwen3_moe", False)])
def test_what_is_rounded_is_said_and_can_be_kept(
    name: str, rounds: bool, gguf: Callable[[str], GgufFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line for each kind of rounding, and a setting with which there is none; up of Q4_0 stands for types
    that no packed format holds.
    """
    if rounds:
        others = {kind: scheme for kind, scheme in KEPT_SCHEMES.items() if kind != "Q4_0"}
        for module in (kept, tensors):
            monkeypatch.setattr(module, "KEPT_SCHEMES", others)
    path = gguf(name).path
    geometry = read_geometry(path)
    layer, rows = geometry.moe_layers[0], rows_of(geometry)
    wanted = golden(decoded(path, geometry), layer, *rows)
    with capture_logs() as logs:
        host = host_of(path)
    said = [line["what"] for line in logs if line["event"] == "packing rounds"]
    assert bool(said) is rounds
    assert all("bfloat16" in what for what in said)
    error = distance(np.asarray(host.forward(layer, *rows)), wanted)
    assert (EXPERTS_FLOAT32 < error < EXPERTS_GGUF_BFLOAT16) if rounds else error < EXPERTS_FLOAT32
    with capture_logs() as logs:
        exact = host_of(path, weight_dtype="float32").forward(layer, *rows)
    assert not [line for line in logs if line["event"] == "packing rounds"]
    assert distance(np.asarray(exact), wanted) < EXPERTS_FLOAT32


class ServedExperts:
    """Has the `submit` and `collect` of an expert client; a server in this process computes."""

    call_log = None

    def __init__(self, host: ExpertHost) -> None:
        self.host = host

    def submit(
        self, layer: int, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Computed at once; the ticket is the float32 answer `[T, H]`."""
        rows = (array.contiguous().numpy() for array in (hidden_states.float(), topk_ids, topk_weights))
        return torch.from_numpy(np.asarray(self.host.forward(layer, *rows)))

    def collect(self, ticket: torch.Tensor, partial: torch.Tensor | None = None) -> torch.Tensor:
        """Returns what `submit` computed, added to what is known."""
        return ticket if partial is None else partial + ticket


def test_log_probabilities_of_k_quants_are_those_of_the_decoded_weights(
    gguf: Callable[[str], GgufFile],
) -> None:
    """Log-probabilities through all layers, as served by default, are so near that no router turns another
    way.
    """
    file = gguf("qwen3_moe")
    tokens = np.random.default_rng(1).integers(3, 200, 200).tolist()
    runner = load_runner(file.path, experts=ServedExperts(host_of(file.path)), page_size=16)
    _, logits = runner.prefill(tokens, chunk=64)
    expected = reference_logits(file.reference, tokens)
    found, wanted = logits.log_softmax(-1), expected.log_softmax(-1)
    torch.testing.assert_close(found, wanted, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


def test_the_cut_of_the_wide_model_lies_inside_a_block(gguf: Callable[[str], GgufFile]) -> None:
    """Guards the division above: blocks of 256 intermediate channels would not be cut by an even one."""
    geometry = read_geometry(gguf("qwen3_moe").path)
    bounds = split_bounds(geometry.moe_intermediate_size, (3, 5), 16)
    assert 0 < bounds[0][1] % 256 < 256


@pytest.mark.parametrize(("dtype", "least", "most"), [("float32", 0.0, 0.0), ("int4", 0.01, 0.2)])
def test_requantising_a_quantised_file_reports_what_it_loses(
    dtype: str, least: float, most: float, gguf: Callable[[str], GgufFile]
) -> None:
    """float32 holds the decoded values exactly; four bits of four bits are a second loss, with a figure."""
    loaded = loaded_of(host_of(gguf("qwen3_moe").path, weight_dtype=dtype))
    assert all(least <= error <= most for error in loaded.relative_errors.values())
