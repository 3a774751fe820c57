"""Guards which experts a start loads where earlier choices are known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from gpu_service.experts.resident.warm_start import most_chosen, most_saving

EXPERTS, TOP_K, TOKENS = 16, 2, 4000
PLACED = {0: (0, 1, 2, 3), 2: (4, 5, 6, 7), 3: (8, 9, 10, 11)}


def counts_of(exponent: float, seed: int) -> NDArray[np.int64]:
    """Returns the counts of TOKENS tokens, by Zipf's law in an order of its own."""
    law = np.arange(1, EXPERTS + 1) ** -exponent
    shares = np.minimum(1.0, law / law.sum() * TOP_K)
    return np.random.default_rng(seed).permutation((shares * TOKENS).astype(np.int64))


def saved_bytes(
    found: dict[int, tuple[int, ...]], known: dict[int, NDArray[np.int64]], nbytes: dict[int, int]
) -> float:
    """What servers need not read per token."""
    return float(sum(known[layer][list(experts)].sum() * nbytes[layer] for layer, experts in found.items()))


def test_a_number_for_each_layer_is_kept() -> None:
    """The most often chosen of each; equals and layers without counts keep what is placed."""
    known = {0: np.array([0] * 12 + [1, 5, 4, 3]), 2: np.zeros(EXPERTS, np.int64)}
    assert most_chosen(PLACED, known) == {0: (12, 13, 14, 15), 2: PLACED[2], 3: PLACED[3]}


def test_layers_that_gain_more_get_more() -> None:
    """The same memory saves more than with equal numbers; every layer keeps a slot."""
    known = {0: counts_of(0.0, 1), 2: counts_of(1.0, 2), 3: counts_of(2.0, 3)}
    nbytes = dict.fromkeys(PLACED, 100)
    found = most_saving(PLACED, known, nbytes, TOP_K)
    assert sum(map(len, found.values())) == 12
    assert all(found.values())
    even = most_chosen(PLACED, known)
    assert saved_bytes(found, known, nbytes) > 1.01 * saved_bytes(even, known, nbytes)


@pytest.mark.parametrize("seed", range(10))
def test_memory_is_what_the_placement_takes(seed: int) -> None:
    """With layers of several formats no more bytes are taken, and no room is left for another expert."""
    rng = np.random.default_rng(seed)
    nbytes = {layer: int(rng.choice([100, 150, 230])) for layer in PLACED}
    known = {layer: counts_of(float(rng.uniform(0, 2)), seed + layer) for layer in PLACED}
    room = sum(4 * each for each in nbytes.values())
    found = most_saving(PLACED, known, nbytes, TOP_K)
    taken = sum(len(experts) * nbytes[layer] for layer, experts in found.items())
    assert room - min(nbytes.values()) < taken <= room
    for layer, experts in found.items():
        assert len(set(experts)) == len(experts)
        assert min(known[layer][list(experts)]) >= np.sort(known[layer])[-len(experts)]


def test_few_tokens_say_little() -> None:
    """What chance made of eight tokens takes no slots from what thousands of tokens choose less often."""
    few, many = np.array([2] * 8 + [0] * 8), np.array([800] * 10 + [0] * 6)
    placed = {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}
    found = most_saving(placed, {0: few, 1: many}, {0: 100, 1: 100}, TOP_K)
    assert [len(found[layer]) for layer in placed] == [1, 7]


def test_numbers_stay_where_a_layer_is_unknown() -> None:
    """A file of some layers only chooses within each."""
    known = {0: counts_of(0.0, 1), 2: counts_of(2.0, 2)}
    found = most_saving(PLACED, known, dict.fromkeys(PLACED, 100), TOP_K)
    assert found == most_chosen(PLACED, known)
    assert [len(experts) for experts in found.values()] == [4, 4, 4]
