"""Invariant: expert servers compute what a GGUF file means, whatever its types and however it is divided."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from tests.helpers.gguf_files import GgufTypes, write_gguf
from tests.helpers.gguf_models import GgufFile, cached_gguf_files, reference_logits
from tests.helpers.paged_runner import load_runner
from tests.helpers.tiny_models import TinyModel, write_tiny_model
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

# Types that "Unsloth Dynamic" files mix: the intermediate size, dense layers' type, and types
# of gate, up and down by layer. Qwen3.8-Flash-Next's experts have 640 channels, which no block of 256 divides
# (pull request 2365 of ikawrakow/ik_llama.cpp); Qwen3-30B-A3B as UD-IQ1_S (14199 of ggml-org/llama.cpp);
# DeepSeek's Q2_K_XL (259 of ik_llama.cpp); gates that differ from ups (2356 there); the 15 types of a
# UD-Q2_K_XL (9820 of anthony-chaudhary/fak); UD-IQ3_XXS (114 of spiritbuun/buun-llama-cpp); Q5_K below Q4_K
# (224 of gittensor-ai-lab/sparkinfer).
MOST_OF_THE_FILE = 1.03
MIXES: dict[str, tuple[int, str, tuple[tuple[str, str, str], ...]]] = {
    "TQ1_0": (512, "TQ1_0", (("TQ1_0", "TQ1_0", "TQ1_0"), ("TQ1_0", "IQ2_XXS", "Q4_K"))),
    "IQ1_S of 640": (320, "Q5_K", (("IQ1_S", "IQ1_S", "IQ4_NL"), ("IQ2_XXS", "IQ1_S", "IQ4_NL"))),
    "IQ1_S": (512, "IQ3_S", (("IQ1_S", "IQ1_M", "IQ2_S"), ("IQ1_M", "IQ2_XXS", "IQ3_XXS"))),
    "IQ2_S": (512, "IQ4_XS", (("IQ2_XXS", "IQ2_XS", "IQ3_XXS"), ("Q2_K", "IQ2_XXS", "IQ2_S"))),
    "IQ3_XXS": (320, "Q6_K", (("IQ2_S", "IQ2_S", "IQ4_NL"), ("IQ3_S", "IQ3_XXS", "IQ4_NL"))),
    "Q2_K_XL": (
        512,
        "Q4_K",
        (("Q2_K", "Q2_K", "Q3_K"), ("IQ2_S", "IQ2_XS", "IQ4_XS"), ("Q2_K", "Q3_K", "Q4_K")),
    ),
    "Q3_K_XL": (512, "Q8_0", (("Q3_K", "Q3_K", "Q4_K"), ("IQ3_XXS", "IQ3_S", "IQ4_XS"))),
    "Q4_K_XL": (
        512,
        "Q8_0",
        (("Q4_K", "Q4_K", "Q5_K"), ("IQ4_XS", "Q5_K", "Q6_K"), ("Q6_K", "Q6_K", "Q8_0")),
    ),
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

    def driven_by_host(self, rows: int) -> AbstractContextManager[None]:
        """Layers are not one call of the extension here."""
        return nullcontext()

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


@pytest.mark.parametrize("mix", MIXES)
def test_mixes_of_types_keep_their_bits_and_mean_what_the_file_says(mix: str, tmp_path: Path) -> None:
    """Every layer takes what it takes in the file, gate and up in formats of their own; log-probabilities are
    those of the decoded weights.
    """
    intermediate, other, layers = MIXES[mix]
    changes = {"hidden_size": 512, "moe_intermediate_size": intermediate, "num_hidden_layers": len(layers)}
    tiny = TinyModel(
        "qwen3_moe", {**changes, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    )
    reference = write_tiny_model(tiny, tmp_path / "published", seed=11)
    path = tmp_path / "model.gguf"
    write_gguf(reference, path, GgufTypes(other=other, experts=layers))
    host = host_of(path)
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for layer, (kinds, layout) in enumerate(zip(layers, loaded_of(host).layouts, strict=True)):
        panels = {"gate": layout.gate, "up": layout.gate_up, "down": layout.down}
        wanted = [KEPT_SCHEMES[kind].packed_format for kind in kinds]
        assert [panel.name for panel in panels.values()] == wanted
        in_file = sum(int(stored[f"blk.{layer}.ffn_{which}_exps.weight"].n_bytes) for which in panels)
        assert 4 * layout.expert_bytes <= MOST_OF_THE_FILE * in_file, (layer, kinds)
    tokens = np.random.default_rng(1).integers(3, 200, 40).tolist()
    runner = load_runner(path, experts=ServedExperts(host), page_size=16, form="packed")
    _, logits = runner.prefill(tokens, chunk=16)
    expected = reference_logits(reference, tokens)
    assert expected.std() > 0.3, "flat logits would hide errors"
    found, decoded_logits = logits.log_softmax(-1), expected.log_softmax(-1)
    torch.testing.assert_close(found, decoded_logits, rtol=0, atol=LOGITS_FLOAT32_VS_TRANSFORMERS)


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
