"""Guards the launching path: nothing of a step may ask the device for a value, or the host would wait for it.

On a CPU such questions cost nothing and are easily written; here every operation that answers one raises.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_service.core.constraint import ConstraintCompiler
from gpu_service.core.request import FinishReason, Request, SamplingParams
from gpu_service.device.stream import HostDeviceStream
from gpu_service.engine.model_runner import ModelRunner
from gpu_service.ops.router import choose_by_kind, zero_experts
from protos.engine_pb2 import Constraint
from tests.helpers.capturable_mla import make_capturable_attention
from tests.helpers.device_experts import DenseExperts
from tests.helpers.layer_values import router_of
from tests.helpers.tiny_engine import Setup, tiny_engine, tiny_model
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.tiny_tokenizer import byte_level_tokenizer

# Operations whose result, or the shape of it, depends on values: each is a wait on a GPU.
ASKING = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::nonzero_numpy",
    "aten::argwhere",
    "aten::masked_select",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::repeat_interleave",
}


class NoQuestions(TorchDispatchMode):
    """Raises at an operation that would make the host wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        # Repeated a number of times, which the host knows, a tensor has a known length.
        asks = name in ASKING and func._overloadname != "self_int"
        # With one argument, `where` is `nonzero`.
        if asks or (name == "aten::where" and len(args) == 1):
            raise AssertionError(f"{name} makes the host wait for the device")
        indices = args[1] if name in ("aten::index", "aten::index_put_", "aten::index_put") else ()
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            raise AssertionError(f"{name} with a mask makes the host wait for the device")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inference", [False, True])
def test_the_guard_sees_what_it_should(inference: bool) -> None:
    """Each of the usual ways of asking is caught, also where torch does not take operations apart."""
    values = torch.arange(4)
    questions = [
        lambda: values.sum().item(),
        lambda: bool(values[0] == 0),
        lambda: values.nonzero(),
        lambda: values.nonzero(as_tuple=True),
        lambda: torch.argwhere(values),
        lambda: torch.where(values > 1),
        lambda: int(values[1]),
        lambda: values[values > 1],
        lambda: values.bincount(),
        lambda: torch.equal(values, values),
    ]
    for ask in questions:
        with pytest.raises(AssertionError, match="wait"), torch.inference_mode(inference), NoQuestions():
            ask()


def test_choices_of_parts_and_without_weights_ask_nothing() -> None:
    """The references too, which run where a device has no Triton."""
    ids = torch.tensor([[0, 3], [4, 2], [-1, -1]], dtype=torch.int32)
    choice = torch.rand(3, 2), ids
    with torch.inference_mode(), NoQuestions():
        zero_experts.reference(torch.randn(3, 8), choice[0], ids.clone(), 3)
        tokens = torch.tensor([1, 2, 0]), torch.tensor([2])
        choose_by_kind.reference(*tokens, choice, choice, 5, (3, 1))


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "qwen3_next", "longcat_flash", "ernie4_5_vl_moe"])
def test_no_step_asks_the_device(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill chunks, mixed batches and decode steps, with everything that the sampler can do."""
    make_tiny_model(name, tmp_path)
    model = tiny_model(tmp_path, torch.device("cpu"))
    experts = DenseExperts(tmp_path, router_of(model.config).num_experts)
    steps = {"compute": 0, "draw": 0}

    def tolist(tensor: torch.Tensor) -> list[Any]:
        raise AssertionError("tolist makes the host wait for the device")

    def guard(name: str) -> None:
        original = getattr(ModelRunner, name)

        def guarded(*arguments: Any) -> Any:
            steps[name] += 1
            with monkeypatch.context() as patch, NoQuestions():
                patch.setattr(torch.Tensor, "tolist", tolist)
                return original(*arguments)

        monkeypatch.setattr(ModelRunner, name, guarded)

    for part in steps:
        guard(part)
    everything = SamplingParams(
        temperature=0.9,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        repetition_penalty=1.2,
        logit_bias=((5, 1.0),),
        allowed_token_ids=tuple(range(3, 200)),
        bad_words=((7,), (8, 9), (3, 8, 9)),
        logprob_token_ids=(4, 5),
        min_tokens=3,
        logprobs=2,
        prompt_logprobs=1,
        max_tokens=6,
    )
    plain = SamplingParams(temperature=1.0, max_tokens=6)
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    requests = [
        Request(f"r{i}", [3 + (i * 37 + k * 5) % 200 for k in range(4 + 15 * i)], params)
        for i, params in enumerate((greedy, everything, plain, everything))
    ]
    compiler = ConstraintCompiler(lambda: byte_level_tokenizer(300), model.config.vocab_size, frozenset({2}))
    masked = Request("masked", [3, 4, 5], everything)
    (masked.constraint,) = compiler.make(Constraint(regex="[a-z]{3,9}"))
    with tiny_engine(model, experts, HostDeviceStream(), make_capturable_attention, Setup()) as engine:
        engine.run([*requests, masked])
    assert masked.finish_reason is FinishReason.LENGTH, masked.error_message
    assert min(steps.values()) > 6
