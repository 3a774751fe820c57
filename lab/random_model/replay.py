"""Checkpoints that replay a recorded routing: every token id chooses the experts of one row of the trace.

A router is linear in the residual stream, so a token can carry its choices in its embedding: some elements
of it are a *code* for every layer, and the router of a layer reads only the elements of its own code. Layers
write to no element that a later router reads, and an RMSNorm multiplies all of them by the same positive
number. So what a token chooses depends on its id alone: not on the tokens before it, on how a step is cut,
or on the format of the experts.

With expert vectors `v_e` (rows of the router) the code `z` of a set S has to satisfy `v_s . z > v_e . z` for
every s in S and e outside it: S is a face of the polytope of the vectors. Of N random vectors in d dimensions
nearly all sets of k are faces while k is small against d / ln(N / d) (Donoho and Tanner 2005, "Neighborliness
of randomly projected simplices in high dimensions"): 8 of 128 experts in the 41 elements that each layer of
Qwen3-30B-A3B can have. The codes are found by the finite Newton method for support vector machines with a
squared hinge (Mangasarian 2002, "A finite Newton method for classification"), with the widest margin kept.
"""

from __future__ import annotations

import concurrent.futures
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.random_model.shapes import GlmShape, RandomShape
from lab.random_model.values import generator
from moebius.errors import UserError
from moebius.experts.placement import ExpertStatistics

Floats = NDArray[np.float32]

# Elements of the residual stream before the codes: the constant one, and the flag of tokens of text.
FIRST_CODE = 2
MAX_CODE_ELEMENTS = 64
# Elements that no code takes tell apart tokens with equal codes: one in 32, and at least 32. They are
# larger than the others, so that what layers add to them changes no chained head's answer.
_FREE, _LEAST_FREE = 32, 32
FREE_STD = 3.0
_VECTORS = 9  # key of the random numbers
# Between the lowest score of a chosen and the highest of another expert, for vectors and codes of length 1:
# rounding to bfloat16 moves either by less than a tenth of this.
_WIDE_MARGIN, _MARGIN = 0.03, 0.005
# Strength of the regularisation, from round to round; most codes have a wide margin after the first.
_PENALTIES, _ITERATIONS = (0.03, 0.01, 0.003), 8
_ROWS_AT_ONCE = 512
# A trace of whose choices fewer than this share can be replayed is refused.
LEAST_SHARE = 0.99


@dataclass(frozen=True, eq=False)
class Replay:
    """Codes of all rows of a trace, N, and the routers that read them; filled by `fit_replay`."""

    codes: NDArray[np.float32]  # [N, layers, D], each of length 1
    routers: NDArray[np.float32]  # [layers, experts, D], each row of length 1
    # Of all choices of the trace, those that the codes reproduce.
    share: float

    @property
    def num_rows(self) -> int:
        """Rows of the trace that tokens stand for."""
        return len(self.codes)

    @property
    def code_elements(self) -> int:
        """Elements of the residual stream for each layer."""
        return int(self.codes.shape[2])

    def begin(self, layer: int) -> int:
        """Returns first element of a layer's code. The last layer's comes first: those before it may not
        write there.

        `begin(layer - 1)` is the first element behind it.
        """
        return FIRST_CODE + (len(self.routers) - 1 - layer) * self.code_elements

    @property
    def end(self) -> int:
        """Elements from here on are no code's."""
        return self.begin(-1)

    def elements(self) -> NDArray[np.float32]:
        """Returns float32 `[N, layers * D]`: the codes as they lie in embeddings from `FIRST_CODE` on,
        variance 1.
        """
        ordered = self.codes[:, ::-1].reshape(self.num_rows, -1)
        return ordered * np.float32(self.code_elements**0.5)


def read_trace(path: Path, shape: RandomShape, most_rows: int) -> NDArray[np.int16]:
    """Returns the first `most_rows` rows of what `experts record --mode per_token` wrote: int16 `[N, layers,
    top_k]`.

    Raises UserError naming what is no such trace, or what differs from the shape.
    """
    option = "--routing-from"
    if isinstance(shape, GlmShape):
        raise UserError(f"{option} is allowed with shapes of Qwen3-MoE; {shape.name} is none")
    trace = ExpertStatistics.read(str(path), option)
    if trace.token_ids is None:
        raise UserError(f"{option}: {path} was recorded with --mode {trace.mode}; allowed: per_token")
    found = {
        "experts": trace.num_experts,
        "experts per token": trace.top_k,
        "layers with experts": trace.layers,
    }
    ours = tuple(range(shape.num_layers))
    wanted = {"experts": shape.num_experts, "experts per token": shape.top_k, "layers with experts": ours}
    for name, value in found.items():
        if value != wanted[name]:
            counts = [len(n) if isinstance(n, tuple) else n for n in (value, wanted[name])]
            raise UserError(
                f"{option}: {path} was recorded of another shape: {counts[0]} {name}, "
                f"{counts[1]} in {shape.name}"
            )
    ids = trace.token_ids[:most_rows]
    if ids.ndim != 3 or ids.shape[1:] != (len(ours), shape.top_k) or not len(ids):
        raise UserError(
            f"{option}: {path} holds choices of shape {list(trace.token_ids.shape)}; allowed: a token or more"
        )
    ordered = np.sort(ids, axis=2)
    if ordered.min() < 0 or ordered.max() >= shape.num_experts or (np.diff(ordered, axis=2) == 0).any():
        raise UserError(f"{option}: {path} has tokens that do not choose {shape.top_k} different experts")
    return ids


def fit_replay(trace: NDArray[np.int16], shape: RandomShape, seed: int, threads: int = 0) -> Replay:
    """Returns codes and routers for int16 `[N, layers, top_k]`.

    Raises UserError where too few can be expressed.
    """
    room = shape.hidden_size - FIRST_CODE - max(_LEAST_FREE, shape.hidden_size // _FREE)
    size = min(MAX_CODE_ELEMENTS, room // shape.num_layers)
    if size < shape.top_k:
        raise UserError(
            f"--routing-from: {room} elements of {shape.name} are too few for {shape.num_layers} layers of "
            f"{shape.top_k} experts per token"
        )
    routers = np.stack([_router(shape.num_experts, size, layer, seed) for layer in range(shape.num_layers)])
    with concurrent.futures.ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        fitted = list(pool.map(_fit_layer, (trace[:, layer] for layer in range(shape.num_layers)), routers))
    share = float(np.mean([found for _, found in fitted]))
    if share < LEAST_SHARE:
        raise UserError(
            f"--routing-from: {size} elements for each of {shape.num_layers} layers express {share:.0%} of "
            f"this trace's choices in {shape.name}; at least {LEAST_SHARE:.0%} are needed"
        )
    return Replay(np.stack([codes for codes, _ in fitted], axis=1), routers, share)


def _router(num_experts: int, size: int, layer: int, seed: int) -> Floats:
    """Returns float32 `[experts, D]`, rows of length 1 that point in directions as different as can
    be had.
    """
    rows = generator(seed, _VECTORS, layer).standard_normal((num_experts, size), np.float32)
    for _ in range(30 if num_experts > size else 0):
        rows = np.linalg.qr(rows)[0]
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    unit: Floats = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return unit


def _fit_layer(chosen: NDArray[np.int16], vectors: Floats) -> tuple[Floats, float]:
    """Returns codes float32 `[N, D]` of int16 `[N, top_k]`, and the share of choices that they reproduce."""
    sets, places = np.unique(np.sort(chosen, axis=1), axis=0, return_inverse=True)
    members = np.zeros((len(sets), len(vectors)), np.bool_)
    np.put_along_axis(members, sets.astype(np.int64), True, axis=1)
    parts = [_codes(members[i : i + _ROWS_AT_ONCE], vectors) for i in range(0, len(sets), _ROWS_AT_ONCE)]
    codes = np.concatenate(parts)
    top_k = chosen.shape[1]
    best = np.argpartition(codes @ vectors.T, -top_k, axis=1)[:, -top_k:]
    hits = np.take_along_axis(members, best, axis=1).mean(axis=1)
    # A code whose margin rounding might bridge counts as one that misses an expert.
    hits = np.where(_margins(codes, members, vectors) < _MARGIN, np.minimum(hits, 1 - 1 / top_k), hits)
    places = places.reshape(-1)
    return codes[places], float(hits[places].mean())


def _codes(members: NDArray[np.bool_], vectors: Floats) -> Floats:
    """Returns float32 `[M, D]`, of length 1: the code with the widest margin for each set of bool `[M,
    experts]`.
    """
    count, (num_experts, size) = len(members), vectors.shape
    best, margins = np.zeros((count, size), np.float32), np.full(count, -np.inf, np.float32)
    planes = np.concatenate([vectors, np.full((num_experts, 1), -1.0, np.float32)], axis=1)
    outer = (planes[:, :, None] * planes[:, None, :]).reshape(num_experts, -1)
    left = np.arange(count)
    solutions = np.zeros((count, size + 1), np.float32)
    for penalty in _PENALTIES:
        ridge = np.diag(np.array([*[penalty] * size, penalty / 100], np.float32))
        own, solution = members[left], solutions[left]
        signs = np.where(own, np.float32(1), np.float32(-1))
        # Members are few: they weigh more.
        weights = np.where(own, np.float32(num_experts / own[0].sum() / 4), np.float32(1))
        for iteration in range(_ITERATIONS):
            active = weights * (signs * (solution @ planes.T) < 1)
            hessian = (active @ outer).reshape(-1, size + 1, size + 1) + ridge
            target = np.linalg.solve(hessian, ((active * signs) @ planes)[:, :, None])[:, :, 0]
            solution = solution + np.float32(1.0 if iteration < 2 else 0.6) * (target - solution)
            codes = solution[:, :size] / np.linalg.norm(solution[:, :size], axis=1, keepdims=True)
            found = _margins(codes, own, vectors)
            is_better = found > margins[left]
            best[left[is_better]], margins[left[is_better]] = codes[is_better], found[is_better]
        solutions[left] = solution
        left = left[margins[left] < _WIDE_MARGIN]
        if not len(left):
            break
    return best


def _margins(codes: Floats, members: NDArray[np.bool_], vectors: Floats) -> Floats:
    """Returns float32 `[M]`: the lowest score of a member less the highest of another."""
    scores = codes @ vectors.T
    lowest = np.where(members, scores, np.float32(np.inf)).min(axis=1)
    margins: Floats = lowest - np.where(members, np.float32(-np.inf), scores).max(axis=1)
    return margins
