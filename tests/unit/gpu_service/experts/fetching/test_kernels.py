"""Invariant: what a step fetches is in a slot when it is computed, each choice is computed once and never
twice, and a layer never takes longer for it.

The kernels run in Triton's interpreter here, over the addresses of real memory.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_service.experts.fetching.kernels import FetchKernels, TorchFetchKernels
from gpu_service.experts.fetching.slots import COPIED, IN_SLOTS, LEFT, addresses_of
from gpu_service.experts.fetching.triton_kernels import TritonFetchKernels
from tests.helpers import triton_interpreter
from tests.helpers.fetching_layers import check_layer, fetch_state
from tests.helpers.resident_layers import Shape
from tests.helpers.stored_experts import MadeServer, expert_split, tensor_split

assert triton_interpreter
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled where a GPU is")

SHAPE = Shape(hidden=64, intermediate=16, experts=11, top_k=4)
CPU = torch.device("cpu")
SERVERS = {
    split: [MadeServer(SHAPE, "int8", part, 1, n) for n, part in enumerate(split(SHAPE, 2))]
    for split in (tensor_split, expert_split)
}


def kernels(name: str) -> FetchKernels:
    """Triton's under the interpreter, or the reference."""
    return TritonFetchKernels(CPU, programs=3) if name == "triton" else TorchFetchKernels()


@st.composite
def _steps(draw: st.DrawFn) -> list[torch.Tensor]:
    """Returns the ids of some steps, int32 `[T, K]`: no row chooses an expert twice, some choices are of
    residents.
    """
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        rows = draw(st.integers(1, 9))
        order = [draw(st.permutations(range(SHAPE.experts))) for _ in range(rows)]
        ids = torch.tensor([row[: SHAPE.top_k] for row in order], dtype=torch.int32)
        gone = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=ids.numel(), max_size=ids.numel())))
        steps.append(ids.masked_fill(gone.view_as(ids) == 0, -1))
    return steps


@settings(deadline=None)
@given(
    steps=_steps(),
    num_slots=st.integers(1, 11),
    server_seconds=st.sampled_from([0.0, 5e-6, 20e-6, 90e-6]),
    split=st.sampled_from([tensor_split, expert_split]),
    hidden_expert=st.integers(0, 10),
    name=st.sampled_from(["triton", "reference"]),
)
def test_every_choice_is_computed_once(
    steps: list[torch.Tensor],
    num_slots: int,
    server_seconds: float,
    split: object,
    hidden_expert: int,
    name: str,
) -> None:
    """Whatever is chosen, servers have it or a slot does, whose bytes are there; and time is saved: in this
    step, or in later ones for experts that were chosen before.
    """
    state, segments = fetch_state(SERVERS[split], num_slots, prices=(server_seconds, 48e-6))  # type: ignore[index]
    state.addresses[:, :, hidden_expert] = 0
    fetching, layer = kernels(name), state.layers[0]
    for ids in steps:
        before, counted = layer.slot_of_expert.clone(), layer.counters.clone()
        served, fetched = fetching.choose(layer, ids)
        fetching.copy(layer)
        fetching.join()
        assert torch.equal(torch.maximum(served, fetched), ids)
        assert torch.equal(torch.minimum(served, fetched), torch.full_like(ids, -1))
        check_layer(layer, 0, segments)
        assert (layer.slot_of_expert[fetched[fetched >= 0].long()] >= 0).all()
        assert (layer.slot_of_expert[served[served >= 0].long()] < 0).all()
        assert layer.slot_of_expert[hidden_expert] == -1
        kept = ids[(ids >= 0) & (before[ids.clamp(min=0).long()] >= 0)].long()
        assert torch.equal(layer.slot_of_expert[kept], before[kept]), "an expert of the step was moved"
        copied, in_slots, left = (layer.counters - counted).tolist()
        assert (copied, in_slots, left) == (
            int(layer.coming[0]),
            int((fetched >= 0).sum()),
            int((served >= 0).sum()),
        )
        missing = (in_slots + left) - len(kept)
        came = layer.coming[1 : 1 + 2 * copied : 2].long()
        rows = torch.bincount(ids[ids >= 0], minlength=layer.num_experts)
        chosen_before = float((layer.scores[came] - rows[came]).sum())
        bound = (missing + chosen_before) * server_seconds * (1 + 1e-5)
        assert max(left * server_seconds, copied * 48e-6) <= bound
        if server_seconds == 0.0:
            assert copied == 0


@settings(deadline=None)
@given(
    steps=_steps(),
    num_slots=st.integers(1, 11),
    server_seconds=st.sampled_from([20e-6, 90e-6]),
    ranks=st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)]),
)
def test_the_kernel_is_the_reference(
    steps: list[torch.Tensor], num_slots: int, server_seconds: float, ranks: tuple[int, int]
) -> None:
    """The kernel agrees over steps that follow one another: the same choices, maps, scores, order of copies
    and counters.
    """
    prices = server_seconds, 48e-6
    states = [fetch_state(SERVERS[tensor_split], num_slots, prices=prices, ranks=ranks) for _ in range(2)]
    for ids in steps:
        found = []
        for name, (state, _) in zip(("triton", "reference"), states, strict=True):
            layer = state.layers[0]
            divided = kernels(name).choose(layer, ids)
            coming = layer.coming[: 1 + 2 * int(layer.coming[0])]
            maps = layer.slot_of_expert, layer.places
            found.append((*divided, *maps, layer.scores, layer.counters, coming))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@settings(deadline=None)
@given(
    steps=_steps(),
    num_slots=st.integers(1, 6),
    num_ranks=st.integers(2, 3),
    server_seconds=st.sampled_from([5e-6, 20e-6, 90e-6]),
    name=st.sampled_from(["triton", "reference"]),
)
def test_ranks_divide_what_is_fetched(
    steps: list[torch.Tensor], num_slots: int, num_ranks: int, server_seconds: float, name: str
) -> None:
    """Each choice is a server's or one rank's; all ranks ask servers for the same, and a rank's slots hold
    what it computes. The copies of no rank make the step longer than what they save.
    """
    prices = server_seconds, 48e-6
    states = [
        fetch_state(SERVERS[tensor_split], num_slots, prices=prices, ranks=(rank, num_ranks))
        for rank in range(num_ranks)
    ]
    layers, fetching = [state.layers[0] for state, _ in states], kernels(name)
    for ids in steps:
        before = layers[0].places.clone()
        divided = []
        for layer, (_, segments) in zip(layers, states, strict=True):
            divided.append(fetching.choose(layer, ids))
            fetching.copy(layer)
            fetching.join()
            check_layer(layer, 0, segments)
            assert (layer.slot_of_expert[divided[-1][1][divided[-1][1] >= 0].long()] >= 0).all()
        for layer, (served, _) in zip(layers[1:], divided[1:], strict=True):
            assert torch.equal(served, divided[0][0])
            assert torch.equal(layer.places, layers[0].places)
            assert torch.equal(layer.counters, layers[0].counters)
        parts = torch.stack([divided[0][0], *(fetched for _, fetched in divided)])
        assert torch.equal(parts.amax(0), ids)
        assert torch.equal((parts >= 0).sum(0), (ids >= 0).long()), "a choice is computed twice"
        copies = [int(layer.coming[0]) for layer in layers]
        chosen = torch.unique(ids[ids >= 0]).long()
        came = chosen[(layers[0].places[chosen] >= 0) & (before[chosen] < 0)]
        assert sum(copies) == len(came)
        rows = torch.bincount(ids[ids >= 0].long(), minlength=SHAPE.experts)
        missing, left = rows[before < 0].sum(), rows[layers[0].places < 0].sum()
        chosen_before = float((layers[0].scores[came] - rows[came]).sum())
        bound = (float(missing) + chosen_before) * server_seconds * (1 + 1e-5)
        assert max(float(left) * server_seconds, max(copies) * 48e-6) <= bound


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_a_copy_may_pay_in_later_steps(name: str) -> None:
    """An expert that is chosen again and again is copied though one step alone would be slower for it, and
    does not take the place of one that is chosen more often.
    """
    state, _ = fetch_state(SERVERS[tensor_split], 1, prices=(23e-6, 48e-6))
    layer, fetching, copied = state.layers[0], kernels(name), list[int]()

    def choose(expert: int) -> None:
        fetching.choose(layer, torch.tensor([[expert] + [-1] * (SHAPE.top_k - 1)], dtype=torch.int32))
        copied.append(int(layer.coming[0]))

    for _ in range(4):
        choose(0)
    assert copied == [0, 0, 1, 0]
    for _ in range(3):
        choose(1)
    assert copied[4:] == [0, 0, 0]
    assert layer.slot_of_expert[0] == 0


@pytest.mark.parametrize("name", ["triton", "reference"])
@pytest.mark.parametrize("missing", range(1, 12))
def test_link_and_servers_are_done_together(name: str, missing: int) -> None:
    """The fewest experts with a row each are copied that make the slower of both fastest."""
    state, _ = fetch_state(SERVERS[tensor_split], 11, prices=(23e-6, 48e-6))
    times = [max((missing - n) * 23e-6, n * 48e-6) for n in range(missing + 1)]
    kernels(name).choose(state.layers[0], torch.arange(missing, dtype=torch.int32).view(1, -1))
    assert int(state.layers[0].counters[COPIED]) == times.index(min(times))


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_what_was_fetched_stays_until_others_are_chosen_more(name: str) -> None:
    """A neighbour that chooses the same needs no copy; what was not chosen for longest leaves."""
    state, _ = fetch_state(SERVERS[tensor_split], 2, prices=(40e-6, 48e-6))
    layer, fetching = state.layers[0], kernels(name)
    step = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32)
    fetching.choose(layer, step)
    held = {expert for expert in range(11) if layer.slot_of_expert[expert] >= 0}
    assert held == {0, 1}
    again = torch.tensor([[0, 1, -1, -1]], dtype=torch.int32)
    assert fetching.choose(layer, again)[1].tolist() == again.tolist()
    before = layer.counters.clone()
    fetching.choose(layer, torch.tensor([[0, 4, 5, 6]], dtype=torch.int32))
    assert layer.slot_of_expert[0] >= 0
    assert layer.slot_of_expert[1] == -1
    assert (layer.counters - before)[[COPIED, IN_SLOTS, LEFT]].tolist() == [1, 2, 2]


def test_parts_that_do_not_fit_are_never_copied() -> None:
    """An expert that lacks a part, or whose part is not registered; a layer in another format."""
    servers = SERVERS[tensor_split]
    _, segments = fetch_state(servers, 2)
    kinds = [part.kind for part in segments.stored[0]]
    stored = [(part, 1 << 20) for part in segments.stored[0]]
    assert all(all(row) for row in addresses_of(kinds, stored, SHAPE.experts))
    for parts in ([stored[0]], [stored[0], (stored[1][0], None)], []):
        assert not any(any(row) for row in addresses_of(kinds, parts, SHAPE.experts))
    whole = SERVERS[expert_split]
    _, others = fetch_state(whole, 2)
    found = addresses_of([others.stored[0][0].kind], [(part, 1 << 20) for part in others.stored[0]], 11)
    assert all(found[0])
    assert not any(any(row) for row in addresses_of(kinds, [(p, 1) for p in others.stored[0]], 11))
