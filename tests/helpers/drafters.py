"""Drafters whose draft tokens a test decides: from the answers of a run without speculation, and others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gpu_service.core.request import Request
from gpu_service.core.step import StepPlan
from gpu_service.layers.context import ForwardContext
from gpu_service.speculation.drafter import FirstPass

Answers = Mapping[str, Sequence[int]]  # tokens of each request, by its id


class AnswerDrafter:
    """Proposes what a request generated before; `wrong_every` n: the last of each n tokens is another."""

    def __init__(self, answers: Answers, vocab_size: int, wrong_every: int = 0) -> None:
        self._answers = answers
        self._vocab_size = vocab_size
        self._wrong_every = wrong_every

    def propose(self, request: Request, count: int) -> list[int]:
        """Returns as many as the answer still has."""
        said = len(request.output_token_ids)
        draft_tokens = list(self._answers.get(request.request_id, ())[said : said + count])
        for index in range(len(draft_tokens)):
            if self._wrong_every and (said + index) % self._wrong_every == self._wrong_every - 1:
                draft_tokens[index] = 1 + (draft_tokens[index] + 1) % (self._vocab_size - 1)
        return draft_tokens


class ScatteredDrafter(AnswerDrafter):
    """The same, but one of the draft tokens is wrong: at times the first, at times a later one, or none."""

    def __init__(self, answers: Answers, vocab_size: int) -> None:
        super().__init__(answers, vocab_size)
        # Where draft tokens were wrong so far, counted from 0.
        self.wrong_places: set[int] = set()

    def propose(self, request: Request, count: int) -> list[int]:
        """Returns as many as the answer still has."""
        draft_tokens = super().propose(request, count)
        place = (len(request.output_token_ids) * 7919 + request.prompt_len * 31) % (count + 1)
        if place < len(draft_tokens):
            draft_tokens[place] = 1 + (draft_tokens[place] + 1) % (self._vocab_size - 1)
            self.wrong_places.add(place)
        return draft_tokens


class FixedDrafter:
    """Always proposes the same draft tokens."""

    def __init__(self, *token_ids: int) -> None:
        self._token_ids = token_ids

    def propose(self, request: Request, count: int) -> list[int]:
        """Returns the first of them."""
        return list(self._token_ids[:count])


class DeviceAnswerDrafter:
    """A `DeviceDrafter` that knows texts, and finds its place in one by the newest tokens."""

    def __init__(self, texts: Sequence[Sequence[int]], error: Exception | None = None) -> None:
        self._texts = [list(text) for text in texts]
        self.error = error
        # Rows of the steps it was called in, and how many drafts each wanted.
        self.rows: list[int] = []
        self.wanted: list[int] = []

    def inputs(self, hidden_states: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Returns them as they are."""
        return hidden_states

    captures = False

    def first_pass(
        self, context: ForwardContext, hidden_states: torch.Tensor, next_ids: torch.Tensor
    ) -> FirstPass:
        """Is never asked for."""
        raise AssertionError("a drafter that is not captured")

    def make_buffer(self, num_rows: int) -> torch.Tensor:
        """For the fake model's hidden states."""
        return torch.zeros((num_rows, 2), dtype=torch.float64)

    def propose(
        self,
        context: ForwardContext,
        plan: StepPlan,
        hidden_states: torch.Tensor,
        next_ids: torch.Tensor,
        last_rows: torch.Tensor,
        first: FirstPass | None = None,
    ) -> torch.Tensor | None:
        """Returns what follows the newest token in the first text that has it there; 0 if none does."""
        assert hidden_states.shape[0] == next_ids.shape[0] == plan.positions.shape[0]
        assert context.inputs is plan
        self.rows.append(hidden_states.shape[0])
        self.wanted.append(plan.num_drafts)
        if self.error is not None:
            raise self.error
        if plan.num_drafts == 0:
            return None
        drafts: list[list[int]] = []
        for row in last_rows.tolist():
            at, newest = int(plan.positions[row]) + 1, int(next_ids[row])
            before = int(plan.input_ids[row])
            found: Any = next((t for t in self._texts if t[at - 1 : at + 1] == [before, newest]), [])
            draft_tokens = list(found[at + 1 : at + 1 + plan.num_drafts])
            drafts.append(draft_tokens + [0] * (plan.num_drafts - len(draft_tokens)))
        return torch.tensor(drafts)
