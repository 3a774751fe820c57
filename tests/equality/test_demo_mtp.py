"""Invariant: with a layer of multi-token prediction the demo model says what it says without, and its draft
tokens, each accepted or not, are those of transformers' own loop.

The layer's weights lie beside the project, not in it: without them there is nothing to compare.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from gpu_service.core.request import Request, SamplingParams
from gpu_service.core.step import StepPlan
from gpu_service.layers.context import ForwardContext
from gpu_service.speculation.mtp import MtpDrafter
from moebius.config import ExpertConfig, GpuConfig, ModelConfigSection, MoebiusConfig
from tests.helpers.built_engine import running_engine
from tests.helpers.demo import demo_checkpoint, golden_answers
from tests.helpers.mtp_models import MTP_FILE, MtpReference, make_heads

pytestmark = [pytest.mark.demo, pytest.mark.full]

PLACE = Path("shared/demo_model/mtp.safetensors")
LAYER = "model.layers.30."


def mtp_weights() -> Path:
    """The layer's tensors. Skips the test where there are none."""
    for directory in Path(__file__).resolve().parents:
        if (directory / PLACE).is_file():
            return directory / PLACE
    pytest.skip(f"no {PLACE} beside the project")


def write_checkpoint(directory: Path) -> Path:
    """The demo checkpoint with the layer as its last."""
    demo, weights = demo_checkpoint(), mtp_weights()
    directory.mkdir()
    for path in demo.iterdir():
        if path.name not in ("config.json", "model.safetensors.index.json"):
            (directory / path.name).symlink_to(path)
    (directory / MTP_FILE).symlink_to(weights)
    names = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names |= dict.fromkeys(opened.keys(), file.name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    config = json.loads((demo / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return directory


def reference_of(directory: Path) -> MtpReference:
    """Transformers' model and its `MtpModel` with the same weights, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_checkpoint(), dtype=torch.float32).eval()
    heads = make_heads(model, 1)
    stored = {name.removeprefix(LAYER): t.float() for name, t in load_file(directory / MTP_FILE).items()}
    experts = len([name for name in stored if name.endswith("gate_proj.weight") and ".experts." in name])
    values: dict[str, torch.Tensor] = {}
    for name in heads.layers[0].state_dict():
        own = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        if own.endswith("experts.gate_up_proj"):
            each = [
                [stored[f"mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up")]
                for e in range(experts)
            ]
            values[name] = torch.stack([torch.cat(pair) for pair in each])
        elif own.endswith("experts.down_proj"):
            values[name] = torch.stack([stored[f"mlp.experts.{e}.down_proj.weight"] for e in range(experts)])
        else:
            values[name] = stored[own]
    heads.layers[0].load_state_dict(values)
    return MtpReference(model, heads)


@pytest.mark.parametrize("number", [0, 3])
def test_the_text_is_the_same_and_every_draft_is_transformers(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft after each step, and whether it was accepted, as a pass of transformers over the text says."""
    directory, answer = write_checkpoint(tmp_path / "demo"), golden_answers(1.0)[number]
    noted: list[tuple[int, int]] = []
    original = MtpDrafter.propose

    def noting(
        drafter: MtpDrafter,
        context: ForwardContext,
        plan: StepPlan,
        hidden_states: torch.Tensor,
        next_ids: torch.Tensor,
        last_rows: torch.Tensor,
    ) -> torch.Tensor | None:
        drafts = original(drafter, context, plan, hidden_states, next_ids, last_rows)
        for row, found in zip(last_rows.tolist(), [] if drafts is None else drafts.tolist(), strict=False):
            noted.append((int(plan.positions[row]) + 2, found[0]))
        return drafts

    monkeypatch.setattr(MtpDrafter, "propose", noting)
    speculation: dict[str, Any] = {
        "speculative_method": "mtp",
        "num_draft_tokens": 1,
        "adaptive_drafts": False,
    }
    config = MoebiusConfig(
        model=ModelConfigSection(model=str(directory), dtype="float32"),
        gpu=GpuConfig(gpu_threads=1, num_pages=64, **speculation),
        experts=ExpertConfig(expert_transport="local"),
    )
    params = SamplingParams(temperature=0.0, max_tokens=len(answer.output_ids))
    request = Request("r", answer.prompt_ids, params)
    with running_engine(config) as engine:
        noted.clear()
        engine.run([request])
    assert request.output_token_ids == answer.output_ids
    text = [*answer.prompt_ids, *answer.output_ids]
    scores = reference_of(directory).logits(text)[0]
    known = [place for place, _ in noted if place < len(text)]
    assert len(known) > 10
    # A draft for the token at `place`, and how many tokens the step that verified it gave.
    accepted = 0
    # The prompt gives the first token, the first decode step the second and a draft for the third.
    expected = len(answer.prompt_ids) + 2
    for place, draft in noted:
        if place >= len(text):
            break
        assert place == expected, "a step gives two tokens if its draft was accepted, else one"
        assert draft == int(scores[place - 2].argmax()), place
        is_right = draft == text[place]
        accepted += is_right
        expected = place + 1 + is_right
    assert 0 < accepted < len(known)
    assert request.accepted_draft_tokens in (accepted, accepted - 1)
