"""The tokens of running requests on the device."""

from __future__ import annotations

import torch


class TokenPool:
    """Token ids of running requests, on the device: the sampler writes, the next step's inputs gather.

    Because of it the host never needs to know a token to launch the step that computes it.

    int32 `[num_slots + 1, max_len]`; row = a request's slot, column = position in prompt + output. The last
    row, `dummy_slot`, belongs to no request: rows of padding read and write it. All methods must run in
    stream order (inside a launch).
    """

    def __init__(self, num_slots: int, max_len: int, device: torch.device) -> None:
        self.tokens = torch.zeros((num_slots + 1, max_len), dtype=torch.int32, device=device)
        self.dummy_slot = num_slots

    def upload(self, slot: int, token_ids: torch.Tensor) -> None:
        """Writes a request's known tokens, int32 `[n]`, when it is given the slot."""
        self.tokens[slot, : token_ids.shape[0]] = token_ids.to(self.tokens.device)

    def gather(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns token ids int64 `[T]` at `positions[t]` of `slots[t]` (both int64 `[T]`)."""
        return self.tokens[slots, positions].long()

    def scatter(self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Writes sampled ids int64 `[R]`; each (slot, position) at most once,
        but for the dummy slot's."""
        self.tokens[slots, positions] = token_ids.to(torch.int32)
