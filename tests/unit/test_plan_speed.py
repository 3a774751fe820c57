"""Guards predicted speeds: efficiencies are those of the document, formulas give what a hand computes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from moebius.app.planning.kernel_efficiency import (
    AMX_RATIOS,
    ROWS,
    VECTOR_RATIOS,
    VECTOR_ROWS,
    kernel_efficiency,
)
from moebius.app.planning.speed import (
    GPU_BANDWIDTH_SHARE,
    GPU_LAYER_SECONDS,
    HAND_OFF_SECONDS,
    HAND_OFF_SERVER_SECONDS,
    LINK_SHARE,
    Work,
    predict_decode,
    predict_prefill,
    step_seconds,
)
from tests.helpers.plan_models import hardware

BENCHMARKS = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text()
# Qwen3-30B-A3B with int4 experts, one GPU and one server of 16 AMX cores.
QWEN = Work(
    num_layers=48,
    moe_layers=48,
    num_experts=128,
    top_k=8,
    hidden_size=2048,
    dense_bytes=2_460_000_000,
    dense_elements=1_230_000_000,
    kv_token_bytes=98304.0,
    attention_width=4096,
    expert_bytes=2_654_208.0,
    resident_expert_bytes=2_654_208.0,
    expert_weights=3 * 2048 * 768,
    weight_format="int4_g32",
    resident_share=0.0,
    servers=1,
    ranks=1,
    request_rows=128,
    item_bytes=2,
)
HOST = hardware("h200", sockets=1, cores=16, bandwidth=210e9, cpu_flops=46e12)


def ratios(section: str, heading: str, rows: tuple[int, ...], part: int) -> dict[str, tuple[float, ...]]:
    """The first ratio of each cell in the columns `rows` of the table behind `heading`."""
    table = BENCHMARKS.split(section)[1].split(heading)[1].split("\n\n")[1].splitlines()
    columns = [re.sub(r"\D", "", cell) for cell in table[0].strip("|").split("|")]
    places = [columns.index(str(count)) for count in rows]
    found = {}
    for line in table[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        parts = [cells[place].split("·")[part] for place in places]
        found[cells[0]] = tuple(float(text.split("/")[0]) for text in parts)
    return found


@pytest.mark.parametrize("shape", sorted(AMX_RATIOS))
def test_efficiencies_are_the_documents(shape: str) -> None:
    """Every measured format and row count of host C, to the digit."""
    found = ratios("## Expert kernels, one MoE layer, host C", f"\n{shape} (", ROWS, 1)
    table = AMX_RATIOS[shape][1]
    assert {name: found[name] for name in table} == table


def test_efficiencies_without_tiles_are_the_documents() -> None:
    """Of host A, whose cells are milliseconds, GB/s, ratios."""
    found = ratios("## Expert kernels, host A", "interleaved with the calls*", VECTOR_ROWS, 2)
    assert {name: found[name] for name in VECTOR_RATIOS} == VECTOR_RATIOS


def test_efficiency_of_what_was_not_measured() -> None:
    """Between rows it is between, beyond the last as there; the nearest shape and format stand in."""
    weights = 3 * 7168 * 2048
    at = [kernel_efficiency("fp8_block", weights, rows, True) for rows in (0.5, 1, 2, 4, 1024, 9000)]
    assert at[0] == at[1] == 0.86
    assert at[1] > at[2] > at[3] == 0.85
    assert at[4] == at[5] == 0.34
    assert kernel_efficiency("fp8_channel", weights, 1, True) == 0.86
    assert kernel_efficiency("int4_g64_zeros_f16", weights, 1, True) == 0.78
    assert kernel_efficiency("int4_g128", weights, 1, True) == 0.78
    assert kernel_efficiency("nvfp4", weights, 1, True) == 0.76
    assert kernel_efficiency("float32", weights, 1, False) == 0.80


@pytest.mark.parametrize(("rows", "milliseconds"), [(1, 0.163), (4, 0.545), (16, 1.81), (64, 3.55)])
def test_a_layer_takes_what_was_measured(rows: int, milliseconds: float) -> None:
    """int4_g32 of Qwen3-30B-A3B on host C: the document's own milliseconds, within 15 %.

    Experts of that run were drawn at random, so different ones are as many as expected on average only.
    """
    seconds = step_seconds(QWEN, HOST, rows, 0).cpu_experts / QWEN.moe_layers
    assert seconds == pytest.approx(milliseconds * 1e-3, rel=0.15)


def test_a_step_by_hand() -> None:
    """One stream of 1000 tokens: each part by its formula."""
    (row,) = predict_decode(QWEN, HOST, [1], 1000)
    parts = row.seconds
    assert row.distinct_experts == pytest.approx(8)
    assert parts.dense == pytest.approx((2.46e9 + 1000 * 98304) / (4.8e12 * GPU_BANDWIDTH_SHARE))
    assert parts.cpu_experts == pytest.approx(48 * 8 * 2654208 / 210e9 / 0.63)
    assert parts.gpu_experts == 0
    link = 2048 * (2 + 4) / (64e9 * LINK_SHARE)
    assert parts.hand_off == pytest.approx(48 * (HAND_OFF_SECONDS + HAND_OFF_SERVER_SECONDS + link))
    assert parts.overhead == pytest.approx(48 * GPU_LAYER_SECONDS)
    assert parts.total == pytest.approx(parts.dense + parts.cpu_experts + parts.hand_off + parts.overhead)
    assert row.tokens_per_second == pytest.approx(1 / parts.total)
    assert parts.bound_by == "experts in RAM"


def test_resident_experts_leave_the_servers() -> None:
    """Half resident: half the bytes in RAM, the other half beside them; all: no server, no hand-off."""
    none, half, everything = (
        step_seconds(replace(QWEN, resident_share=share), HOST, 4, 0) for share in (0.0, 0.5, 1.0)
    )
    assert half.cpu_experts == pytest.approx(none.cpu_experts / 2)
    assert half.gpu_experts == pytest.approx(everything.gpu_experts / 2)
    assert half.total < none.total
    assert everything.cpu_experts == everything.hand_off == none.gpu_experts == 0


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
