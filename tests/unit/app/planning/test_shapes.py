"""Guards plans of published shapes: from config.json alone and from headers, fitting or refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from app.planning.capacity import DoesNotFit, Wish
from app.planning.gpu_use import plan_capacity
from app.planning.memory import RAM, stored_experts
from app.planning.planner import Planner
from gpu_service.assembly.forecast import Forecast
from gpu_service.memory.plan import RESIDENT
from moebius.errors import UserError
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_geometry
from tests.helpers.plan_models import GIB, PUBLISHED, hardware, settings, write_config, write_headers
from tests.tolerances import PLANNED_BYTES, STATED_PARAMETERS


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns a directory with config.json of each model."""
    root = tmp_path_factory.mktemp("published")
    return {name: write_config(root / name, config) for name, (config, _) in PUBLISHED.items()}


@pytest.fixture(scope="module")
def qwen(published: dict[str, Path]) -> Planner:
    """Qwen3-30B-A3B for a GPU."""
    return Planner(settings(published["qwen3-30b-a3b"]), on_gpu=True)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_as_many_as_stated(published: dict[str, Path], name: str) -> None:
    """Dense ones of the composed model and routed ones of the geometry make up the published number."""
    geometry = read_geometry(published[name])
    ranks = Forecast(settings(published[name], language_model_only="true"), on_gpu=True).ranks
    config = PUBLISHED[name][0]
    embedding = geometry.hidden_size * int(config.get("text_config", config)["vocab_size"])
    each = 3 * geometry.hidden_size * geometry.moe_intermediate_size
    routed = len(geometry.moe_layers) * geometry.num_experts * each
    total = ranks[0].read_elements + embedding + routed
    assert total == pytest.approx(PUBLISHED[name][1], rel=STATED_PARAMETERS)


@pytest.mark.parametrize(
    ("name", "formats", "gigabytes"),
    [
        # Stated sizes of the experts alone: parameters x bits, and a scale per block of 128 x 128, or per 32.
        ("qwen3-30b-a3b", "bfloat16", 48 * 128 * 3 * 2048 * 768 * 2),
        ("deepseek-v3", "fp8_block", 58 * 256 * 3 * 7168 * 2048),
        ("kimi-k2", "fp8_block", 60 * 384 * 3 * 7168 * 2048),
        ("glm-4.7", "bfloat16", 89 * 160 * 3 * 5120 * 1536 * 2),
        ("gpt-oss-120b", "mxfp4", 36 * 128 * 3 * 2880 * 2880 * 17 // 32),
        # Choices without weights take nothing, and experts of two widths what each of them has.
        ("longcat-flash-chat", "bfloat16", 28 * 512 * 3 * 6144 * 2048 * 2),
        ("ernie-4.5-vl-424b-a47b", "bfloat16", 51 * 64 * 3 * 8192 * (3584 + 1536) * 2),
    ],
)
def test_experts_take_what_their_format_says(
    published: dict[str, Path], name: str, formats: str, gigabytes: int
) -> None:
    """On a CPU alone all experts of two servers take parameters times bits, within 3 %."""
    text = {"language_model_only": "true"}
    config = settings(published[name], kv_cache_gib="8", expert_split="expert", **text)
    plan = Planner(config, on_gpu=False).plan(hardware(ram_gib=4096))
    assert plan.settings["experts"] == formats
    experts = [part for part in plan.components if part.part.startswith("experts of server")]
    assert [part.node for part in experts] == [0, 1]
    assert sum(part.nbytes for part in experts) == pytest.approx(gigabytes, rel=PLANNED_BYTES)
    assert "no files of weights" in plan.notes[0]


def header_tensors(geometry: MoeGeometry, experts: int) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Yields the first experts of every layer in blocks of fp8, as DeepSeek-V3 is published."""
    inner, hidden = geometry.moe_intermediate_size, geometry.hidden_size
    for layer in geometry.moe_layers:
        for expert in range(experts):
            for name, rows, cols in (
                ("gate", inner, hidden),
                ("up", inner, hidden),
                ("down", hidden, inner),
            ):
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"
                scales = (math.ceil(rows / 128), math.ceil(cols / 128))
                yield stem, "F8_E4M3", (rows, cols), rows * cols
                yield f"{stem}_scale_inv", "F32", scales, 4 * scales[0] * scales[1]


def test_headers_say_what_the_configuration_said(published: dict[str, Path], tmp_path: Path) -> None:
    """DeepSeek-V3 with a header of its real shapes and no data: the same plan."""
    directory = write_config(tmp_path / "deepseek-v3", PUBLISHED["deepseek-v3"][0])
    geometry = read_geometry(directory)
    write_headers(directory, header_tensors(geometry, 1))
    assert stored_experts(directory, geometry) == stored_experts(published["deepseek-v3"], geometry)
    plans = [
        Planner(settings(path, kv_cache_gib="4", dense_weights="dequantise"), on_gpu=False).plan(hardware())
        for path in (directory, published["deepseek-v3"])
    ]
    assert plans[0].components == plans[1].components
    assert len(plans[1].notes) == len(plans[0].notes) + 1


def test_as_many_experts_as_fit_are_resident(qwen: Planner) -> None:
    """One more would not fit: with the wanted KV cache, and never more than the model has."""
    host = hardware("4090")
    plan = qwen.plan(host, Wish(context=32768, concurrency=2))
    each = plan.residency.by_layer[0]
    assert 0 < each < 128
    assert set(plan.residency.by_layer.values()) == {each}
    assert plan.serve_flags == f"--gpu-experts {each}"
    assert plan.kv.tokens >= 65536
    chosen = {"gpu_experts": str(each), "gpu_layers": "", "model": qwen.config.model.model}
    same = Planner(settings(Path(chosen.pop("model")), **chosen), on_gpu=True).plan(host)
    assert [p for p in same.components if p.part == RESIDENT] == [
        p for p in plan.components if p.part == RESIDENT
    ]
    config = settings(Path(qwen.config.model.model), gpu_experts=str(each + 1))
    with pytest.raises(DoesNotFit):
        Planner(config, on_gpu=True).plan(host, Wish(context=32768, concurrency=2))
    everything = qwen.plan(hardware("h200"))
    assert everything.residency.is_everything
    assert not [part for part in everything.components if part.part.startswith("experts of")]


def test_ranks_divide_dense_weights_and_experts(published: dict[str, Path]) -> None:
    """Two GPUs become two ranks, each with about half; a number that does not divide heads is not taken."""
    config = settings(published["qwen3-30b-a3b"])
    one, two = (plan_capacity(config, hardware("a100", count), Wish(), True) for count in (1, 2))
    three = plan_capacity(config, hardware("a100", 3), Wish(), True)
    assert two.settings["tensor_parallel_size"] == "2" == three.settings["tensor_parallel_size"]
    halves = [part.nbytes for part in two.components if part.part == "dense weights"]
    whole = [part.nbytes for part in one.components if part.part == "dense weights"]
    assert len(halves) == 2
    assert sum(halves) == pytest.approx(sum(whole), rel=PLANNED_BYTES)
    assert two.kv.token_bytes * 2 == one.kv.token_bytes
    assert "--tensor-parallel-size 2" in two.serve_flags
    with pytest.raises(UserError, match="4 ranks need as many GPUs, there are 2"):
        plan_capacity(
            settings(published["qwen3-30b-a3b"], tensor_parallel_size="4"), hardware("a100", 2), Wish(), True
        )


def test_too_little_ram_is_refused_with_formats_that_fit(published: dict[str, Path]) -> None:
    """The figures are those of the plans that follow the advice."""
    config = settings(published["deepseek-v3"], expert_dtype="bfloat16")
    planner, host = Planner(config, on_gpu=True), hardware("a100", ram_gib=503, sockets=1)
    with pytest.raises(DoesNotFit, match=r"needs \d+ GiB of RAM .* in bfloat16\), 503 GiB are") as caught:
        planner.plan(host)
    needed = dict(re.findall(r"(\w+) needs (\d+)", str(caught.value).split("--expert-dtype")[1]))
    assert set(needed) == {"keep", "int8", "int4"}
    assert int(needed["int4"]) < 503 < int(needed["int8"])
    advised = settings(published["deepseek-v3"], expert_dtype="int4")
    followed = Planner(advised, on_gpu=True).plan(host)
    assert followed.total_of(RAM) / GIB == pytest.approx(int(needed["int4"]), abs=1)
    with pytest.raises(DoesNotFit, match="none of these fits"):
        planner.plan(replace(host, ram_bytes=64 * GIB))


def test_one_numa_node_may_be_too_small(published: dict[str, Path]) -> None:
    """All nodes together would do, but three servers on two nodes leave one with two thirds."""
    config = settings(published["qwen3-30b-a3b"], expert_servers="3", kv_cache_gib="1", expert_split="expert")
    with pytest.raises(DoesNotFit, match=r"NUMA node 0 needs 36 GiB .* 32 GiB of it are allowed"):
        Planner(config, on_gpu=False).plan(hardware(ram_gib=64.5))


def test_a_wanted_context_is_refused_with_what_would_fit(published: dict[str, Path]) -> None:
    """Fewer streams, shorter ones, or more GPUs; all three are true."""
    config = settings(published["qwen3-30b-a3b"])
    wish = Wish(context=40960, concurrency=8)
    with pytest.raises(DoesNotFit) as caught:
        plan_capacity(config, hardware("4090"), wish, True)
    found = re.search(
        r"8 streams of 40960 tokens need 30 GiB .* fit: (\d+) streams of 40960 tokens, or 8 streams of "
        r"(\d+) tokens; (\d) such GPUs",
        str(caught.value),
    )
    assert found is not None, str(caught.value)
    fewer, shorter, gpus = map(int, found.groups())
    assert plan_capacity(config, hardware("4090"), Wish(40960, fewer), True).kv.tokens >= 40960 * fewer
    assert plan_capacity(config, hardware("4090"), Wish(shorter, 8), True).kv.tokens >= shorter * 8
    assert plan_capacity(config, hardware("4090", gpus), wish, True).kv.tokens >= 8 * 40960
    with pytest.raises(UserError, match="--context: 99999 is not allowed"):
        plan_capacity(config, hardware("4090"), Wish(99999), True)


def test_a_gpu_too_small_for_dense_weights_is_refused(published: dict[str, Path]) -> None:
    """In the ledger's own words, with a number of GPUs that would do."""
    with pytest.raises(DoesNotFit, match=r"GPU memory: dense weights .* GiB are missing.* such GPUs"):
        plan_capacity(
            settings(published["deepseek-v3"], dense_weights="dequantise"), hardware("3090"), Wish(), True
        )
