"""Guards predicted speeds: formulas give what a hand computes, from measured times of kernels and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from app.planning.host_engine import HostEngine
from app.planning.speed import (
    ASSUMED_EXPERT_BANDWIDTH_SHARE,
    GPU_BANDWIDTH_SHARE,
    GPU_LAYER_SECONDS,
    HAND_OFF_SECONDS,
    HAND_OFF_SERVER_SECONDS,
    LINK_SHARE,
    TILES_BANDWIDTH_SHARE,
    ExpertTimes,
    Work,
    assumed_peak_share,
    grouped_share,
    predict_decode,
    predict_prefill,
    step_seconds,
    windows_of,
)
from moebius.host.kernel_times import MeasuredOn, PanelTimes
from moebius.models.read import read_model_config
from tests.helpers.plan_models import hardware, write_config
from tests.helpers.published_checkpoints import Published

# Qwen3-30B-A3B with int4 experts, one GPU and one server of 16 AMX cores.
QWEN = Work(
    num_layers=48,
    moe_layers=48,
    num_experts=128,
    top_k=8,
    hidden_size=2048,
    dense_bytes=2_460_000_000,
    layer_elements={"": 919_000_000},
    head_elements={"": 311_000_000},
    kv_token_bytes=98304.0,
    attention_width=48 * 4096,
    expert_bytes=2_654_208.0,
    resident_expert_bytes=2_654_208.0,
    grouped_share=grouped_share(("int4_g32", "int4_g32")),
    expert_weights=3 * 2048 * 768,
    expert_times=None,
    resident_share=0.0,
    servers=1,
    ranks=1,
    request_rows=128,
    item_bytes=2,
    engine=HostEngine(15, 2048, 1.0, True, {}),
)
HOST = hardware("h200", sockets=1, cores=16, bandwidth=210e9, cpu_flops=46e12)


# Nanoseconds of a panel with 2048 (gate, up) and 768 (down) input features, as 16 AMX cores gave them.
GATE_UP = PanelTimes(
    MeasuredOn("cpu", 16, "amx", "b"), "int4_g32", "bfloat16", 2048, ((1, 160.0), (4, 200.0))
)
DOWN = PanelTimes(MeasuredOn("cpu", 16, "amx", "b"), "int4_g32", "bfloat16", 768, ((1, 60.0), (8, 60.0)))
MEASURED = ExpertTimes((GATE_UP,), DOWN, 2 * 768 // 16, 2048 // 16, 2048, 768)


def test_a_panels_time_between_and_beyond_what_was_measured() -> None:
    """Times are linear between numbers of rows, proportional beyond the last and to the input features."""
    at = [GATE_UP.seconds(rows, 2048) * 1e9 for rows in (0.5, 1, 2, 4, 16)]
    assert at == pytest.approx([160, 160, 160 + 40 / 3, 200, 800])
    three = replace(GATE_UP, points=((1, 160.0), (4, 200.0), (8, 300.0)))
    assert three.seconds(4, 2048) == pytest.approx(200e-9)
    assert GATE_UP.seconds(1, 4096) == pytest.approx(2 * GATE_UP.seconds(1, 2048))


@pytest.mark.parametrize("rows", [1, 64])
def test_a_layer_takes_its_experts_panels(rows: int) -> None:
    """Different experts with their mean number of rows, panels times nanoseconds; two servers share them."""
    work = replace(QWEN, expert_times=MEASURED)
    distinct = 128 * (1 - (1 - 8 / 128) ** rows)
    each = rows * 8 / distinct
    expected = distinct * (96 * GATE_UP.seconds(each, 2048) + 128 * DOWN.seconds(each, 768))
    assert step_seconds(work, HOST, rows, 0).cpu_experts == pytest.approx(48 * expected)
    halves = step_seconds(replace(work, servers=2), HOST, rows, 0)
    assert halves.cpu_experts == pytest.approx(24 * expected)


def test_a_step_by_hand() -> None:
    """One stream of 1000 tokens: each part by its formula."""
    (row,) = predict_decode(QWEN, HOST, [1], 1000)
    parts = row.seconds
    assert row.distinct_experts == pytest.approx(8)
    assert parts.dense == pytest.approx((2.46e9 + 1000 * 98304) / (4.8e12 * GPU_BANDWIDTH_SHARE))
    read = 8 * 2654208 / 210e9 / ASSUMED_EXPERT_BANDWIDTH_SHARE
    multiplied = 8 * 2 * 3 * 2048 * 768 / (46e12 * assumed_peak_share("amx", 1))
    assert parts.cpu_experts == pytest.approx(48 * (read + multiplied))
    assert parts.gpu_experts == 0
    link = 2048 * (2 + 4) / (64e9 * LINK_SHARE)
    assert parts.hand_off == pytest.approx(48 * (HAND_OFF_SECONDS + HAND_OFF_SERVER_SECONDS + link))
    assert parts.overhead == pytest.approx(48 * GPU_LAYER_SECONDS)
    assert parts.total == pytest.approx(parts.dense + parts.cpu_experts + parts.hand_off + parts.overhead)
    assert row.tokens_per_second == pytest.approx(1 / parts.total)
    assert parts.bound_by == "experts in RAM"


def test_a_window_bounds_what_is_read(tmp_path: Path) -> None:
    """Half of the layers see 128 tokens, as gpt-oss's: at 8192 they read a 64th, at 100 all."""
    windowed = replace(QWEN, windows={128: 0.5})
    long, short = (
        [step_seconds(work, HOST, 1, tokens).dense for work in (QWEN, windowed)] for tokens in (8192, 100)
    )
    assert short[0] == short[1]
    saved = 0.5 * (1 - 128 / 8192) * 8192 * 98304 / (4.8e12 * GPU_BANDWIDTH_SHARE)
    assert long[0] - long[1] == pytest.approx(saved)
    published = Published.load("gpt-oss-120b").config
    directory = write_config(tmp_path, published)
    assert windows_of(read_model_config(directory)) == {128: pytest.approx(0.5)}


def test_resident_experts_leave_the_servers() -> None:
    """Half resident: half the bytes in RAM, the other half next to them; all: no server, no hand-off."""
    none, half, everything = (
        step_seconds(replace(QWEN, resident_share=share), HOST, 4, 0) for share in (0.0, 0.5, 1.0)
    )
    assert half.cpu_experts == pytest.approx(none.cpu_experts / 2)
    assert half.gpu_experts == pytest.approx(everything.gpu_experts / 2)
    assert half.total < none.total
    assert everything.cpu_experts == everything.hand_off == none.gpu_experts == 0


def test_formats_reach_what_their_decoding_leaves() -> None:
    """The slower one of two matrices counts, and what no grouped kernel takes is as slow as tiles."""
    names = ("fp8_block", "int4_g32", "int4_g32_mins_products", "iq4_g32_products", "int2_g128_f16")
    shares = [grouped_share((name, name)) for name in names]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == TILES_BANDWIDTH_SHARE == grouped_share(None)
    assert grouped_share(("int4_g32", "int6_g16_products")) == shares[2]
    assert grouped_share(("int8_g32_f16+int4_g32_zeros", "int4_g32")) == TILES_BANDWIDTH_SHARE


def test_requests_of_a_prompt_read_experts_again() -> None:
    """A chunk of 512 rows in requests of 128 reads what four of them read; larger requests read once."""
    pieces = step_seconds(QWEN, HOST, 512, 0).cpu_experts
    assert pieces == pytest.approx(4 * step_seconds(QWEN, HOST, 128, 0).cpu_experts)
    at_once = predict_prefill(replace(QWEN, request_rows=4096), HOST, 512, 4096)
    assert at_once.seconds.cpu_experts < pieces
    assert at_once.rows == 512
    assert predict_prefill(QWEN, HOST, 512, 100).rows == 100


def test_operations_bound_large_chunks() -> None:
    """Four times the rows, four times the dense time on a GPU, once reading weights is not what takes it."""
    first, second = (step_seconds(QWEN, HOST, rows, 0, 0).dense for rows in (4096, 16384))
    assert second == pytest.approx(4 * first)


# docs/benchmarks.md, host D: one H200 (link 55 GB/s), 163 GB/s and 16 AMX cores, int4 experts.
HOST_D = hardware("h200", sockets=1, cores=16, bandwidth=163e9, cpu_flops=46e12)


@pytest.mark.parametrize(
    ("streams", "resident", "measured"),
    [
        *((1, 0.0, 82.5), (4, 0.0, 119.4), (8, 0.0, 138.4), (16, 0.0, 171.9), (32, 0.0, 212.8)),
        *((1, 1.0, 416.9), (8, 1.0, 1684.5), (64, 1.0, 8221.0)),
    ],
)
def test_decode_as_it_was_measured(streams: int, resident: float, measured: float) -> None:
    """Tokens per second of one H200, all experts in RAM and all on the GPU, are predicted within 15 %."""
    (row,) = predict_decode(replace(QWEN, resident_share=resident), HOST_D, [streams], 200)
    assert row.tokens_per_second == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("tokens", "resident", "measured"),
    [
        *((512, 0.0, 2498.0), (4096, 0.0, 13456.0), (16384, 0.0, 30011.0)),
        *((512, 1.0, 20500.0), (1024, 1.0, 31030.0), (2048, 1.0, 42230.0), (4096, 1.0, 47100.0)),
    ],
)
def test_prefill_as_it_was_measured(tokens: int, resident: float, measured: float) -> None:
    """Predictions are near measurements, also of prompts whose experts are streamed, divided between link and
    servers, or resident.
    """
    work = replace(QWEN, resident_share=resident, request_rows=2048)
    if resident:
        work = replace(work, prompt_graph_tokens=2048)
    row = predict_prefill(work, HOST_D, 16384 if resident else 512, tokens, 16384)
    assert row.tokens_per_second == pytest.approx(measured, rel=0.15)


def test_a_prompt_passes_the_head_once() -> None:
    """Logits of its last token alone are computed: a head of any size adds next to nothing."""
    wide = replace(QWEN, head_elements={"": 3_110_000_000}, resident_share=1.0)
    narrow = replace(wide, head_elements={})
    found = [predict_prefill(work, HOST_D, 4096, 4096).seconds.dense for work in (wide, narrow)]
    assert found[0] == pytest.approx(found[1], rel=0.01)
    rows = [step_seconds(work, HOST_D, 4096, 0, 0).dense for work in (wide, narrow)]
    assert rows[0] > 2 * rows[1]


def test_streaming_is_planned_only_where_it_is_faster() -> None:
    """A short prompt's experts, or those of a slow link, stay with the servers."""
    slow = replace(HOST_D, gpu=replace(HOST_D.gpu, link=1e9)) if HOST_D.gpu else HOST_D
    work = replace(QWEN, request_rows=2048)
    with_ring, without = (predict_prefill(work, slow, 512, 512, chunk) for chunk in (16384, 0))
    assert with_ring.tokens_per_second >= without.tokens_per_second
    assert with_ring.tokens_per_second == pytest.approx(without.tokens_per_second, rel=0.1)
    assert predict_prefill(work, HOST_D, 512, 8192, 16384).rows == 8192


def packed(name: str) -> Work:
    """Returns QWEN with its layers, not its head, in a packed format."""
    layers = QWEN.layer_elements[""]
    kept = int(layers * 4.5 / 8)
    nbytes = QWEN.dense_bytes - 2 * layers + kept
    return replace(QWEN, dense_bytes=nbytes, packed_bytes=kept, layer_elements={name: layers})


def dense_times(work: Work, rows: int) -> float:
    return step_seconds(work, HOST, rows, 0, 0).dense


def test_packed_dense_weights_take_what_was_measured() -> None:
    """By rows: one is faster than in 16 bits, 64 take twice as long, and many as long and the unpacking."""
    assert HOST.gpu is not None
    layers, head = QWEN.layer_elements[""], QWEN.head_elements[""]
    head_seconds = 2 * head / (HOST.gpu.bandwidth * GPU_BANDWIDTH_SHARE)
    plain = 2 * layers / (HOST.gpu.bandwidth * GPU_BANDWIDTH_SHARE)
    for rows, speed in ((1, 1.9), (4, 1.4), (16, 1.15), (64, 0.5)):
        assert dense_times(packed("int4_g32"), rows) == pytest.approx(plain / speed + head_seconds, rel=0.02)
    moved = layers * (2 + 4.5 / 8) / (HOST.gpu.bandwidth * 0.35)
    for rows in (512, 4096):
        more = dense_times(packed("int4_g32"), rows) - dense_times(QWEN, rows)
        assert more == pytest.approx(moved, rel=0.02)


def test_formats_without_cuda_kernels_are_slower_in_steps_of_some_rows() -> None:
    """They are as fast with one row and with many, and take more than twice as long between."""
    for name in ("iq2_xxs_grid_products", "int3_g16_products", "tq1_products"):
        slow, fast = packed(name), packed("int4_g32")
        assert dense_times(slow, 1) == dense_times(fast, 1)
        assert dense_times(slow, 64) > 2 * dense_times(fast, 64)
        assert dense_times(slow, 8) > 4 * dense_times(fast, 8)
        assert dense_times(slow, 512) < 1.1 * dense_times(fast, 512)
