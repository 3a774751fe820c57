"""Token counts of requests with penalties, kept on the device and advanced by each sampled token."""

from __future__ import annotations

import torch

from gpu_service.engine.sampling_plan import PenaltyRows


class PenaltyCounts:
    """One row of counts per request that has penalties; rows are allocated at first use.

    All methods must run in stream order. Meaning of the penalties as in protos/engine.proto: repetition
    looks at prompt and output, presence and frequency at the output only.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._row_of_slot: dict[int, int] = {}
        self._output_counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    @property
    def num_rows(self) -> int:
        """Rows allocated so far."""
        return self._output_counts.shape[0]

    def assign(self, slot: int, token_ids: torch.Tensor, prompt_len: int) -> None:
        """Rebuilds a slot's counts from all its known tokens, int `[n]`, prompt first."""
        row = self._row_of_slot.setdefault(slot, len(self._row_of_slot))
        if row >= self.num_rows:
            self._enlarge(max(1, 2 * self.num_rows))
        token_ids = token_ids.long().to(self._device)
        self._in_prompt[row] = False
        self._in_prompt[row, token_ids[:prompt_len]] = True
        self._output_counts[row] = torch.bincount(token_ids[prompt_len:], minlength=self._vocab_size)

    def apply(self, logits: torch.Tensor, plan: PenaltyRows) -> None:
        """Changes the planned rows of float32 `[R, V]` logits in place.

        Repetition as in CTRL (Keskar et al. 2019): a seen token's logit is divided by the penalty when
        positive and multiplied when negative. Presence and frequency as in the OpenAI API.
        """
        rows = [self._row_of_slot[slot] for slot in plan.slots]
        counts = self._output_counts[rows]
        occurred = counts > 0
        chosen = logits[plan.rows]
        seen = occurred | self._in_prompt[rows]
        scaled = torch.where(chosen > 0, chosen / plan.repetition, chosen * plan.repetition)
        chosen = torch.where(seen, scaled, chosen)
        chosen = chosen - plan.frequency * counts - plan.presence * occurred
        logits[plan.rows] = chosen

    def advance(self, plan: PenaltyRows, token_ids: torch.Tensor) -> None:
        """Counts the sampled tokens, int64 `[R]`, of the planned rows."""
        rows = torch.tensor([self._row_of_slot[slot] for slot in plan.slots], device=self._device)
        self._output_counts[rows, token_ids[plan.rows]] += 1

    def _enlarge(self, num_rows: int) -> None:
        for name in ("_output_counts", "_in_prompt"):
            old = getattr(self, name)
            new = torch.zeros((num_rows, self._vocab_size), dtype=old.dtype, device=self._device)
            new[: old.shape[0]] = old
            setattr(self, name, new)
