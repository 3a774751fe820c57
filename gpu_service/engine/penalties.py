"""Token counts of requests with penalties, kept on the device and advanced by each sampled token."""

from __future__ import annotations

import torch

from gpu_service.engine.sampling_plan import PenaltyRows


class PenaltyCounts:
    """One row of counts per slot. Rows are allocated at first use, or at once for `num_slots` slots.

    All methods must run in stream order, and none waits for the device. Meaning of the penalties as in
    protos/engine.proto: repetition looks at prompt and output, presence and frequency at the output only.
    """

    def __init__(self, vocab_size: int, device: torch.device, num_slots: int = 0) -> None:
        self._output_counts = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((num_slots, vocab_size), dtype=torch.bool, device=device)

    @property
    def num_rows(self) -> int:
        """Rows allocated so far."""
        return self._output_counts.shape[0]

    def assign(self, slot: int, token_ids: torch.Tensor, prompt_len: int) -> None:
        """Rebuilds a slot's counts from all its known tokens, int `[n]`, prompt first."""
        if slot >= self.num_rows:
            self._enlarge(1 << slot.bit_length())
        token_ids = token_ids.long().to(self._output_counts.device)
        output = token_ids[prompt_len:]
        self._in_prompt[slot].zero_().index_fill_(0, token_ids[:prompt_len], True)
        counts = self._output_counts[slot].zero_()
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def apply(self, logits: torch.Tensor, plan: PenaltyRows) -> None:
        """Changes the planned rows of float32 `[R, V]` logits in place.

        Repetition as in CTRL (Keskar et al. 2019): a seen token's logit is divided by the penalty when
        positive and multiplied when negative. Presence and frequency as in the OpenAI API.
        """
        counts = self._output_counts[plan.slots]
        occurred = counts > 0
        chosen = logits[plan.rows]
        seen = occurred | self._in_prompt[plan.slots]
        scaled = torch.where(chosen > 0, chosen / plan.repetition, chosen * plan.repetition)
        chosen = torch.where(seen, scaled, chosen)
        chosen = chosen - plan.frequency * counts - plan.presence * occurred
        logits[plan.rows] = chosen

    def advance(self, plan: PenaltyRows, token_ids: torch.Tensor) -> None:
        """Counts the sampled tokens, int64 `[R]`, of the planned rows."""
        self._output_counts[plan.slots, token_ids[plan.rows]] += 1

    def retract(self, plan: PenaltyRows, token_ids: torch.Tensor) -> None:
        """Undoes `advance`, for a step that has to be run again. Steps are undone in reverse order."""
        self._output_counts[plan.slots, token_ids[plan.rows]] -= 1

    def _enlarge(self, num_rows: int) -> None:
        for name in ("_output_counts", "_in_prompt"):
            old = getattr(self, name)
            new = old.new_zeros((num_rows, old.shape[1]))
            new[: old.shape[0]] = old
            setattr(self, name, new)
