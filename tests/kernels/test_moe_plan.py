"""The plan names a kernel that can compute the format for every number of rows; forcing a level or a kernel
leaves no other in it; measuring changes the choice, never what is allowed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from moebius import _kernels_testing as testing
from moebius.kernels import ExpertEngine, Isa, PlanRow, supported_isas
from moebius.kernels.weight_formats import WEIGHT_FORMATS
from tests.helpers.moe_golden import Routed, from_bfloat16, random_rows, to_bfloat16
from tests.helpers.packed_experts import Shape, packed_golden, root_mean_square_error
from tests.tolerances import EXPERTS_BFLOAT16, EXPERTS_W8A8

ISAS: tuple[Isa, ...] = supported_isas()  # type: ignore[assignment]
FORMATS = tuple(WEIGHT_FORMATS)
GEMMS = tuple(testing.gemm_names())


def engine_of(weight_format: str, **options: Any) -> ExpertEngine:
    return ExpertEngine(64, 32, 2, 1, weight_format=weight_format, num_threads=1, **options)


def calibrated(engine: ExpertEngine) -> ExpertEngine:
    """Returns the same engine, measured on random weights of its only layer."""
    testing.fill_random(engine.backend, 0, 1)
    engine.calibrate()
    return engine


def row_types(row: PlanRow) -> tuple[str, ...]:
    """Types of prepared rows that a kernel of this entry may read."""
    if row.format == "int8_w8a8":
        return ("int8",)
    return ("float32", "bfloat16") if row.row_type == "bfloat16" else ("float32",)


def check_plan(plan: list[PlanRow]) -> None:
    """Ranges join without a gap from 1 on, and every kernel knows the format and the rows it is given."""
    for matrix in ("gate_up", "down"):
        for row_type in ("float32", "bfloat16"):
            rows = [row for row in plan if (row.matrix, row.row_type) == (matrix, row_type)]
            assert rows[0].rows_from == 1
            assert rows[-1].rows_to is None
            assert all(a.rows_to == b.rows_from - 1 for a, b in pairwise(rows))
            for row in rows:
                allowed = [name for t in row_types(row) for name in testing.gemms_for(row.format, t)]
                assert row.kernel in allowed


def level_of(kernel: str) -> str:
    return max((isa for isa in ISAS if kernel.startswith(f"{isa}_")), key=len)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_number_of_rows_has_a_kernel(weight_format: str) -> None:
    """Every number of rows has a kernel by the fixed rule, and after measuring too."""
    engine = engine_of(weight_format)
    check_plan(engine.plan())
    assert all(row.nanoseconds == 0 for row in engine.plan())
    check_plan(calibrated(engine).plan())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("weight_format", ["bfloat16", "int4_g32", "int8_w8a8"])
def test_forced_level(isa: Isa, weight_format: str) -> None:
    """Only one level's kernels are used, and none above the forced level, measured or not."""
    engine = calibrated(engine_of(weight_format, isa=isa))
    check_plan(engine.plan())
    for row_type in ("float32", "bfloat16"):
        levels = {level_of(row.kernel) for row in engine.plan() if row.row_type == row_type}
        assert len(levels) == 1
        assert ISAS.index(levels.pop()) <= ISAS.index(isa)  # type: ignore[arg-type]


def test_forced_level_takes_its_own_kernels() -> None:
    """The scalar level and every other that has kernels for float32 rows use them."""
    own = {level_of(name) for name in testing.gemms_for("int4_g32", "float32") if "emulated" not in name}
    for isa in ISAS:
        if isa in own:
            plan = engine_of("int4_g32", isa=isa).plan()
            assert {level_of(row.kernel) for row in plan if row.row_type == "float32"} == {isa}


@pytest.mark.parametrize("kernel", GEMMS)
def test_forced_kernel(kernel: str) -> None:
    """A kernel named by the caller computes every request whose rows it can read, at any number of rows.

    What threads keep of one request's rows is never taken for another's, nor where they are too many to keep.
    """
    type_of = {
        name: t for t in ("float32", "bfloat16", "int8") for name in testing.gemms_for("int8_w8a8", t)
    } | {name: t for t in ("float32", "bfloat16") for name in testing.gemms_for("int4_g32", t)}
    weight_format = "int8_w8a8" if type_of[kernel] == "int8" else "int4_g32"
    shape = Shape(192, 96, 4, weight_format, weight_format)
    engine = shape.engine(num_threads=2, kernel=testing.gemm_kernel(kernel))
    engine.calibrate()
    used = [row for row in engine.plan() if type_of[kernel] in row_types(row)]
    assert used
    assert {row.kernel for row in used} == {kernel}
    for rows in (1, 2, 3, 33, 300):
        routed = random_rows(np.random.default_rng(rows), rows, 192, 3, (-1, 5))
        bits = to_bfloat16(routed.hidden_states)
        narrow = Routed(from_bfloat16(bits), routed.topk_ids, routed.topk_weights)
        output = engine.forward(0, bits, routed.topk_ids, routed.topk_weights)
        bound = EXPERTS_W8A8 if weight_format == "int8_w8a8" else 2 * EXPERTS_BFLOAT16
        assert root_mean_square_error(output, packed_golden(engine, shape, narrow)) <= bound


def test_float32_requests_are_not_measured() -> None:
    """The kernel of a float32 request never depends on timing: its bits must not."""
    engine = calibrated(engine_of("bfloat16"))
    wide = [row for row in engine.plan() if row.row_type == "float32"]
    assert len({row.kernel for row in wide}) == 1
    assert all(row.nanoseconds == 0 for row in wide)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa in ("scalar", "avx2")])
def test_times_are_measured_where_there_is_one_kernel(isa: Isa) -> None:
    """Below AVX-512 there is no choice, but the planner needs times of more than one row all the same."""
    plan = calibrated(engine_of("int4_g32", isa=isa)).plan()
    for matrix in ("gate_up", "down"):
        narrow = [row for row in plan if (row.matrix, row.row_type) == (matrix, "bfloat16")]
        assert len({row.kernel for row in narrow}) == 1
        assert sum(row.nanoseconds > 0 for row in narrow) > 1


def test_calibration_measures_loaded_experts() -> None:
    """Choices of loaded formats are measured, one by one where there are several; others stay."""
    for loaded in (False, True):
        engine = ExpertEngine(128, 64, 4, 2, weight_format=["int4_g32", "int8_w8a8"], num_threads=2)
        if loaded:
            testing.fill_random(engine.backend, 0, 0)
        engine.calibrate()
        check_plan([row for row in engine.plan() if row.format == "int4_g32"])
        unloaded = [row for row in engine.plan() if row.format == "int8_w8a8"]
        check_plan(unloaded)
        assert all(row.nanoseconds == 0 for row in unloaded)
        if len(testing.gemms_for("int4_g32", "bfloat16")) > 0:
            few = [row for row in engine.plan() if row.rows_from == 1 and row.format == "int4_g32"]
            assert all((row.nanoseconds > 0) == loaded for row in few if row.row_type == "bfloat16")
