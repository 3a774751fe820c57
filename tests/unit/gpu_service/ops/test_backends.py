"""Invariant: ops run on the best library that works; what is missing costs one warning and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

import tests.helpers.triton_interpreter  # noqa: F401
from gpu_service.attention.flashinfer_plan import attention_modules
from gpu_service.cache.fp8 import E4M3
from gpu_service.ops import backends, example_sizes, examples
from gpu_service.ops.activation import silu_and_mul
from gpu_service.ops.backends import OPS, install, install_tables, load_tables, uninstall
from gpu_service.ops.kv import append_kv
from gpu_service.ops.norm import rms_norm
from gpu_service.ops.registry import Implementation
from moebius.models.layers.gqa import GQA
from moebius.models.layers.latent import MLA
from moebius.models.layers.layer import mixers
from moebius.models.layers.recurrent import Recurrent
from tests.helpers.attention_cases import Geometry
from tests.helpers.compile_cases import published
from tests.helpers.fake_flashinfer import BUILT, install_fake_flashinfer
from tests.helpers.layer_values import mixers_of
from tests.helpers.ops import assert_same_op, example

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[4]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles where a GPU is")


@pytest.fixture(autouse=True)
def _references_afterwards() -> Iterator[None]:
    yield
    uninstall("cpu")


def _warnings(logs: list[Any]) -> list[Any]:
    return [log for log in logs if log["log_level"] == "warning"]


def test_a_cpu_has_its_own_kernels_and_imports_no_gpu_library() -> None:
    program = (
        "import sys, torch, gpu_service.ops.backends as b\n"
        "assert b.install(torch.device('cpu'))['rms_norm'] == 'cpu > torch'\n"
        "sys.exit(bool({'triton', 'flashinfer'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
    assert install(CPU, "triton") == {}


def test_every_op_has_an_example_and_tables_name_ops_only() -> None:
    names = [op.name for op in OPS]
    assert len(set(names)) == len(names)
    assert all(examples.example(name, CPU, torch.float32) for name in names)
    assert set(load_tables(["triton"])["triton"]) <= set(names)


def test_triton_takes_all_ops_but_five_and_is_the_reference(pytestconfig: pytest.Config) -> None:
    """Through the ops' own dispatch, as layers call them."""
    with capture_logs() as logs:
        chosen = install_tables(CPU, load_tables(["triton"]), torch.float32)
    assert not _warnings(logs)
    rest = {name: libraries for name, libraries in chosen.items() if libraries != "triton"}
    limited = "gated_delta_extend", "kimi_delta_extend", "linear", "add_norm_linear"
    limited += "rotate_and_append", "add_norm_route"  # type: ignore[assignment]
    partly = dict.fromkeys(limited, "triton > torch")
    left = "truncate_probabilities", "silu", "apply_gate", "absorb_query", "project_values"
    assert rest == dict.fromkeys(left, "torch") | partly
    (line,) = [log for log in logs if "chosen" in log["event"]]
    assert {name: line[name] for name in chosen} == chosen
    for op in OPS:
        # Kernels of mixed steps take the interpreter longest: ops/triton/test_linear_attention.py.
        if pytestconfig.getoption("--full") or not op.name.endswith("_extend"):
            assert_same_op(op, op, example(op, CPU, torch.float32), torch.float32)


@pytest.mark.parametrize(
    "order", [["flashinfer", "triton"], pytest.param(["flashinfer"], marks=pytest.mark.full)]
)
def test_flashinfer_adapters_pass_what_flashinfer_documents(
    order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake_flashinfer(monkeypatch)
    with capture_logs() as logs:
        chosen = install_tables(CPU, load_tables(order), torch.float16)
    assert not _warnings(logs)
    assert chosen["rms_norm"].startswith("flashinfer > ")
    assert chosen["append_kv"].startswith(order[-1])
    assert sorted(BUILT) == ["norm", "sampling", "silu"], "compiled together, and before the first call"
    # The others are Triton's, of which the test above is.
    adapted = [op for op in OPS if "flashinfer" in chosen[op.name]]
    assert len(adapted) >= 4
    for op in adapted:
        assert_same_op(op, op, example(op, CPU, torch.float16), torch.float16)


@pytest.mark.parametrize(
    ("heads", "storage", "modules"),
    [
        (8, torch.float16, ["prefill fa2 torch.float16 torch.int32 64 64"]),
        (8, E4M3, ["prefill fa2 torch.float8_e4m3fn torch.int32 64 64"]),
        (
            4,
            torch.float16,
            ["decode torch.float16 torch.int32 64 64", "prefill fa2 torch.float16 torch.int32 64 64"],
        ),
    ],
)
def test_attention_is_compiled_with_the_ops(
    monkeypatch: pytest.MonkeyPatch, heads: int, storage: torch.dtype, modules: list[str]
) -> None:
    """What the model's attention calls is compiled from the start on, not at the first step."""
    install_fake_flashinfer(monkeypatch)
    config = Geometry(num_heads=heads, num_kv_heads=2, head_dim=64).config()
    load_tables(["flashinfer"], lambda: attention_modules(config.layers, torch.float16, storage))
    for thread in threading.enumerate():
        if thread.name == "flashinfer-attention":
            thread.join()
    assert sorted(BUILT) == sorted([*modules, "norm", "sampling", "silu"])
    assert attention_modules(config.layers, torch.float32, torch.float32) == []


def test_ops_do_not_wait_for_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its modules take longest: weights are loaded meanwhile. One that cannot be compiled costs a warning
    here, and is attention's own failure when it is tried out."""
    install_fake_flashinfer(monkeypatch)
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        is_aot = False

        def build(self, verbose: bool) -> None:
            begun.set()
            go_on.wait(30)
            raise RuntimeError("nvcc fatal: no such architecture")

    with capture_logs() as logs:
        assert set(load_tables(["flashinfer"], lambda: [Slow()])) == {"flashinfer"}
        assert begun.wait(30)
        assert sorted(BUILT) == ["norm", "sampling", "silu"]
        go_on.set()
        for thread in threading.enumerate():
            if thread.name == "flashinfer-attention":
                thread.join()
    assert "nvcc fatal" in next(log["error"] for log in _warnings(logs))


def test_compilers_leave_the_processors_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are measured while modules are compiled are chosen as on an idle machine."""
    install_fake_flashinfer(monkeypatch)
    from gpu_service.ops.flashinfer import COMPILER_NICENESS, compile_modules

    found: list[int] = []

    class Spec:
        is_aot = False

        def build(self, verbose: bool) -> None:
            command = [sys.executable, "-S", "-c", "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"]
            found.append(int(subprocess.check_output(command)))

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    compile_modules([Spec(), Spec()])
    assert found == [max(own, COMPILER_NICENESS)] * 2
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own, "the caller's stays"


def test_modules_installed_as_built_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start with the package of prebuilt modules takes no compiler's time for what it holds."""
    install_fake_flashinfer(monkeypatch)
    from gpu_service.ops.flashinfer import compile_modules

    built: list[bool] = []

    class Spec:
        def __init__(self, is_aot: bool) -> None:
            self.is_aot = is_aot

        def build(self, verbose: bool) -> None:
            built.append(self.is_aot)

    compile_modules([Spec(True)])
    assert built == []
    compile_modules([Spec(True), Spec(False)])
    assert built == [False]


def test_arguments_beyond_a_library_go_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer takes 16-bit types and aligned rows; here neither is given."""
    install_fake_flashinfer(monkeypatch)
    install_tables(CPU, load_tables(["flashinfer"]), torch.float16)
    x, weight = torch.randn(3, 12), torch.randn(12)
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm.reference(x, weight, 1e-6))
    odd = torch.randn(3, 7).half()
    assert torch.equal(
        rms_norm(odd, weight[:7].half(), 1e-6), rms_norm.reference(odd, weight[:7].half(), 1e-6)
    )
    slots = torch.zeros(4, 2, 64).to(torch.float8_e4m3fn)
    row = torch.full((1, 1, 64), 3.0).half()
    append_kv(slots, row, row, torch.tensor([2]), key_scale=2.0, value_scale=0.5)
    assert slots[2, 0, 0].float() == 1.5
    assert slots[2, 1, 0].float() == 6.0


def test_interleaved_rotation_through_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_flashinfer(monkeypatch)
    install_tables(CPU, load_tables(["flashinfer"]), torch.float16)
    from gpu_service.ops.rope import apply_rope, rope_table
    from gpu_service.ops.rope_frequencies import inverse_frequencies

    positions, frequencies = torch.tensor([0, 9, 5000]), inverse_frequencies(1e4, 32, "default", {})
    table = rope_table(positions, frequencies, torch.float16, True)
    heads = torch.randn(3, 5, 64).half()
    expected = apply_rope.reference(heads.clone(), table)
    torch.testing.assert_close(apply_rope(heads, table), expected, rtol=4e-3, atol=4e-3)


def test_missing_libraries_cost_one_warning_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        backends, "TABLES", {"flashinfer": "gpu_service.ops.no_such", "triton": "gpu_service.ops.nor_this"}
    )
    with capture_logs() as logs:
        chosen = install_tables(CPU, load_tables(backends.BACKENDS["auto"]), torch.float32)
    assert [log["library"] for log in _warnings(logs)] == ["flashinfer", "triton"]
    assert "no_such" in _warnings(logs)[0]["error"]
    assert "moebius[gpu]" in _warnings(logs)[0]["install"]
    assert set(chosen.values()) == {"torch"}
    gate_up = torch.randn(2, 6)
    assert torch.equal(silu_and_mul(gate_up.clone()), silu_and_mul.reference(gate_up.clone()))


def test_a_library_that_fails_is_named_once_and_the_next_takes_its_ops() -> None:
    """A compiler that is missing shows at the first launch only."""

    def broken(*args: Any) -> None:
        raise RuntimeError("no compiler\n" + "a page of output\n" * 50)

    tables = {
        "flashinfer": {"rms_norm": Implementation(broken), "silu_and_mul": Implementation(broken)},
        "triton": {"rms_norm": Implementation(lambda x, weight, eps: "next")},
    }
    with capture_logs() as logs:
        chosen = install_tables(CPU, tables, torch.float32)
    (warning,) = _warnings(logs)
    assert warning["library"] == "flashinfer"
    assert warning["ops"] == ["rms_norm", "silu_and_mul"]
    assert warning["error"] == "RuntimeError: no compiler"
    assert (chosen["rms_norm"], chosen["silu_and_mul"]) == ("triton", "torch")
    assert rms_norm(torch.zeros(1, 2), torch.zeros(2), 1e-6) == "next"


def test_what_is_known_to_work_is_not_tried_again() -> None:
    """The same implementations in the same order, also none; another op is tried as ever."""
    calls: list[str] = []

    def implementation(name: str, takes: bool | None = None) -> Implementation:
        def run(x: torch.Tensor, *others: Any) -> torch.Tensor:
            calls.append(name)
            return x

        return Implementation(run, None if takes is None else lambda *_: takes)

    tables = {
        "flashinfer": {"rms_norm": implementation("some", takes=True), "silu": implementation("refused")},
        "triton": {"rms_norm": implementation("all"), "silu_and_mul": implementation("tried")},
    }
    known = {"rms_norm": "flashinfer > triton", "silu": "torch"}
    chosen = install_tables(CPU, tables, torch.float32, known=known)
    assert calls == ["tried"]
    assert {name: chosen[name] for name in known} == known
    rms_norm(torch.zeros(1, 2), torch.zeros(2), 1e-6)
    assert calls == ["tried", "some"]


@pytest.mark.parametrize("line", ["gone", "triton > gone", "triton", ""])
def test_what_was_known_of_others_is_tried(line: str) -> None:
    """A library that is not there any more, or that does not take everything by now, as it did."""
    some = Implementation(lambda x, *_: x, lambda *_: True)
    tables = {"triton": {"rms_norm": some}}
    chosen = install_tables(CPU, tables, torch.float32, known={"rms_norm": line})
    assert chosen["rms_norm"] == "triton > torch"


def test_an_op_is_tried_with_the_sizes_of_the_model() -> None:
    """What fits a small example may need more shared memory than the device has at a model's own sizes."""

    def fits_when_narrow(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        if x.shape[1] > 4096:
            raise RuntimeError("out of resource: shared memory, Required: 123392, Hardware limit: 101376")

    tables = {"triton": {"rms_norm": Implementation(fits_when_narrow)}}
    with capture_logs() as logs:
        assert install_tables(CPU, tables, torch.float32)["rms_norm"] == "triton"
        assert not _warnings(logs)
        wide = [replace(example_sizes.SMALL, hidden=2048), replace(example_sizes.SMALL, hidden=7168)]
        chosen = install_tables(CPU, tables, torch.float32, wide)
    assert chosen["rms_norm"] == "torch"
    (warning,) = _warnings(logs)
    assert (warning["ops"], warning["instead"]) == (["rms_norm"], {"rms_norm": "torch"})
    assert "shared memory" in warning["error"]
    assert "slower" in warning["cost"]


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "deepseek-v3", "step-3.5-flash", "gpt-oss-20b"])
def test_sizes_of_a_model_are_its_own(name: str) -> None:
    """The start-up try-out compiles what the service will: decode steps and chunks of every kind of layer."""
    config = published(name)
    sizes = example_sizes.sizes_of(config, config.layers)
    assert {each.tokens > 16 for each in sizes} == {False, True}
    attending = [mixer for mixer in mixers(config.layers) if isinstance(mixer, GQA | MLA)]
    heads = {mixer.num_heads for mixer in attending}
    assert {each.queries for each in sizes} == heads
    assert {each.hidden for each in sizes} == {config.hidden_size}
    recurrent = mixers_of(config, Recurrent)
    if recurrent:
        *_, states, _, _ = examples.example("gated_delta_update", CPU, torch.bfloat16, sizes[0])
        linear = recurrent[0]
        assert states.shape[1:] == (linear.num_value_heads, linear.key_head_dim, linear.value_head_dim)
    for op in OPS:
        assert examples.example(op.name, CPU, torch.bfloat16, sizes[0])


def test_installing_again_replaces_the_earlier_choice() -> None:
    install_tables(CPU, {"triton": {"rms_norm": Implementation(lambda *args: "fast")}}, torch.float32)
    install_tables(CPU, {}, torch.float32)
    assert isinstance(rms_norm(torch.ones(1, 2), torch.ones(2), 1e-6), torch.Tensor)
