"""The half of an attention backend's contract that is about steps, whatever the attention reads."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gpu_service.engine.step import ForwardInputs


class PlannedAttention(ABC):
    """Causal attention over pages, for any mixture of prefill chunks and decodes.

    `plan` is host work, done once per step before the forward; a forward is called once per layer and
    uses what the last `plan` left. One plan is alive at a time: a step's forward must have been launched
    before the next `plan`. Not thread-safe. On a GPU every call is made with the stream current on which
    the forwards run: what a plan copies or launches is ordered between the last step and this one.

    In a captured graph a forward reads the tensors that `plan_capture` was given; they are refilled, and
    `plan_replay` called, before each replay. A backend that can not do this leaves `captures` False.
    """

    captures = False

    @abstractmethod
    def plan(self, inputs: ForwardInputs) -> None:
        """Prepare whatever all layers of this step share (indices, masks, kernel schedules).

        Raises ValueError when the inputs contradict themselves or exceed the block table.
        """

    def plan_capture(self, inputs: ForwardInputs) -> None:
        """Prepare recording a step of `len(inputs.seq_lens)` requests that compute one token each.

        The tensors of `inputs` keep their memory for the graph's life. Raises NotImplementedError unless
        `captures`.
        """
        raise NotImplementedError(f"{type(self).__name__} can not be captured in a graph")

    def plan_replay(self, inputs: ForwardInputs) -> None:
        """Before replaying the graph captured for as many requests: `inputs` are its refilled tensors."""
        raise NotImplementedError(f"{type(self).__name__} can not be captured in a graph")
