"""What the tokens of simulated decode steps choose: drawn as `models random` draws routers, or recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.random_model.topics import NO_TOPICS, NUM_ELEMENTS, Topics, fitted_share, router_columns
from lab.random_model.values import SCORE_STD, generator, layer_biases
from moebius.errors import UserError
from moebius.experts.placement import ExpertStatistics

Counts = NDArray[np.int16]
"""int16 `[steps, layers, num_experts]`: how many rows of the step chose the expert."""
# Keys of random streams, apart from those of `models random`.
_TOPIC, _NOISE = 20, 21


@dataclass(frozen=True)
class Routing:
    """Whose choices are replayed; filled by the command line."""

    name: str
    top_k: int
    counts: Callable[[int], Counts]  # By number of streams: int16 [steps, layers, num_experts].
    phases: int = 1


@dataclass(frozen=True)
class RandomRouting:
    """Routers as `models random` writes them, on tokens whose topic changes; filled by the command line."""

    layers: int = 12
    num_experts: int = 128
    top_k: int = 8
    # Of the Zipf law by which experts are chosen; 0: evenly. Layers take them in turn.
    exponents: tuple[float, ...] = (1.2,)
    topics: Topics = NO_TOPICS
    # Equal parts of the steps, each with another order of the experts by how often they are chosen.
    phases: int = 1
    seed: int = 0

    def counts(self, steps: int, streams: int) -> Counts:
        """Returns the choices of `steps` decode steps of `streams` requests, each of which has its own topic.

        Raises UserError when the overlap is out of reach.
        """
        topics = self._trajectories(steps, streams)
        found = np.empty((steps, self.layers, self.num_experts), np.int16)
        for layer in range(self.layers):
            share = fitted_share(self.topics, self.num_experts, self.top_k, self._exponent(layer))
            rng = generator(self.seed, _NOISE, layer)
            scores = rng.standard_normal((steps, streams, self.num_experts), np.float32)
            if share > 0:
                scores *= math.sqrt(1 - share)
                scores += math.sqrt(share) * (topics @ router_columns(self.num_experts, layer, self.seed).T)
            scores *= SCORE_STD
            scores += self._biases(layer, steps)[:, None]
            chosen = np.argpartition(scores, -self.top_k, axis=2)[:, :, -self.top_k :]
            found[:, layer] = rows_that_chose(chosen, self.num_experts)
        return found

    def _exponent(self, layer: int) -> float:
        return self.exponents[layer % len(self.exponents)]

    def _biases(self, layer: int, steps: int) -> NDArray[np.float32]:
        """Returns float32 `[steps, num_experts]`."""
        by_phase = np.stack(
            [
                layer_biases(self.num_experts, self.top_k, self._exponent(layer), layer, self.seed + phase)
                for phase in range(self.phases)
            ]
        )
        return by_phase[np.arange(steps) * self.phases // steps].astype(np.float32)

    def _trajectories(self, steps: int, streams: int) -> NDArray[np.float32]:
        """Returns float32 `[steps, streams, NUM_ELEMENTS]`: an autoregressive process of order one, unit
        variance.
        """
        kept = self.topics.correlation
        found = generator(self.seed, _TOPIC).standard_normal((steps, streams, NUM_ELEMENTS), np.float32)
        for step in range(1, steps):
            found[step] = kept * found[step - 1] + math.sqrt(1 - kept**2) * found[step]
        return found


def rows_that_chose(chosen: NDArray[np.integer], num_experts: int) -> NDArray[np.int16]:
    """Returns int16 `[steps, num_experts]` of expert ids `[steps, streams, top_k]`; negative ids are left
    out.
    """
    steps = chosen.shape[0]
    flat = chosen.reshape(steps, -1).astype(np.int64)
    places = np.arange(steps)[:, None] * num_experts + flat
    counted = np.bincount(places[flat >= 0], minlength=steps * num_experts)
    return counted.reshape(steps, num_experts).astype(np.int16)


def random_routing(drawn: RandomRouting, steps: int) -> Routing:
    """Draws the routing of `steps` decode steps, whatever the number of streams."""
    topics = drawn.topics
    skew = ",".join(f"zipf:{each:g}" if each else "none" for each in drawn.exponents)
    name = (
        f"skew {skew}, overlap {topics.overlap} %, topics of {topics.topic_tokens} tokens, "
        f"changes: {drawn.phases - 1}"
    )
    return Routing(name, drawn.top_k, lambda streams: drawn.counts(steps, streams), drawn.phases)


def recorded_routing(path: Path) -> Routing:
    """Returns the choices of a file that `moebius experts record start --mode per_token` led to.

    With several streams the recorded tokens are cut into as many consecutive parts, which decode side by
    side. Raises UserError naming the file when it cannot be read, or has no choices of tokens.
    """
    statistics = ExpertStatistics.read(str(path))
    ids = statistics.token_ids
    if ids is None:
        raise UserError(
            f"--trace: {path} has no choices of tokens; allowed: a file of "
            "`moebius experts record start --mode per_token`"
        )

    def counts(streams: int) -> Counts:
        steps = len(ids) // streams
        if steps < 2:
            raise UserError(f"--trace: {path} has {len(ids)} tokens, too few for --streams {streams}")
        by_stream = ids[: steps * streams].reshape(streams, steps, *ids.shape[1:]).swapaxes(0, 1)
        layers = [
            rows_that_chose(by_stream[:, :, layer], statistics.num_experts) for layer in range(ids.shape[1])
        ]
        return np.stack(layers, axis=1)

    return Routing(f"recorded: {path}", statistics.top_k, counts)
