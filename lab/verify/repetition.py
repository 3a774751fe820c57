"""How much a text repeats itself, by the measures of Welleck et al. 2020, arXiv:1908.04319, section 3.2."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Of the two measures: tokens that a prediction may repeat, and tokens of an n-gram.
PRECEDING = 128
NGRAM = 4


def seq_rep(token_ids: Sequence[int], n: int = NGRAM) -> float:
    """Returns seq-rep-n: the share of n-grams that have occurred before, 1 - |unique n-grams| / |n-grams|.

    It grows with the length of the text: compare texts of one length. 0 of a text shorter than n.
    """
    ngrams = [tuple(token_ids[begin : begin + n]) for begin in range(len(token_ids) - n + 1)]
    return 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def mean_seq_rep(token_ids: Sequence[int], window: int) -> float:
    """Returns the mean seq-rep-4 of the text's whole windows of `window` tokens; of all of a shorter one."""
    begins = range(0, len(token_ids) - window + 1, window) or [0]
    return sum(seq_rep(token_ids[begin : begin + window]) for begin in begins) / len(begins)


def rep(sequence: torch.Tensor, predictions: torch.Tensor, preceding: int = PRECEDING) -> float:
    """Returns rep/l: the share of most probable tokens that occur among the l tokens before their place.

    `predictions` int64 `[N]` are for the last N places of `sequence` int64 `[P + N]`. Both a server and its
    reference may be asked about one sequence: whether a server repeats what the model itself would not.
    """
    padded = torch.cat([sequence.new_full((preceding,), -1), sequence[:-1]])
    before = padded.unfold(0, preceding, 1)[-len(predictions) :]
    return float((before == predictions.unsqueeze(1)).any(1).double().mean())
