"""The record of a step, from the scheduler's choice to what the layers of a model read.

`Batch` (the scheduler: which tokens of which requests) becomes a `StepPlan` (the input builder: every tensor
of the step, on the host), which is staged on the device and run. A `StepPlan` is the `ForwardInputs` that
layers and attention read, and what the model runner and the sampler need besides: no record is copied into
another one on the way. The ids of its tokens alone are only on the device, in the `TokenPool`. `results.py`
has the way back.

To add a tensor to every step, declare it here, fill it in `InputBuilder.build`, and read it where it is used
(`context.inputs.<name>` in a layer). The declaration is what all else is derived from:

    class ForwardInputs:
        token_types: Annotated[Tensor | None, TensorField("T", int32, captured=True)] = None

staging (`tensors_of`, `with_tensors`), the memory that captured graphs read it from and the padding of it
(`captured_fields`, `graph_rows`), and the test that compares shapes and dtypes of built steps with what is
declared (`tests/unit/gpu_service/engine/test_step.py`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import torch
from opentelemetry.context import Context
from torch import Tensor, float32, float64, int32, int64
from torch import bool as boolean

from gpu_service.core.images import ImageFeatures, ImagePlan
from gpu_service.core.request import Request

Tree = TypeVar("Tree")


@dataclass(slots=True)
class Batch:
    """Filled by the scheduler; read by the input builder, the sampler and the commit."""

    requests: list[Request]
    # Tokens computed for each request: positions [start, start + num_new_tokens).
    start_positions: list[int]
    num_new_tokens: list[int]
    # Whether the step reaches the request's last known token, so that a next one is sampled.
    samples: list[bool]
    # Requests given a slot in this step; their known tokens must be uploaded before it runs.
    admitted: list[Request] = field(default_factory=list)
    # Which output token (from 0) each request samples; meaningless where `samples` is False.
    output_positions: list[int] = field(default_factory=list)
    step: int = 0
    # Of models with linear attention: the slots that each request's state is read from and written to.
    state_reads: list[int] = field(default_factory=list)
    state_writes: list[int] = field(default_factory=list)
    # Long prompts alone, while others that decode wait for their turn (`scheduler/pacing.py`).
    is_prompt_turn: bool = False
    # Of a step that verifies drafts: each request's, for the positions after its own token.
    drafts: list[list[int]] = field(default_factory=list)
    # Of models with states, of each request's drafts: the slots that the states after them are written to.
    draft_states: list[list[int]] = field(default_factory=list)
    # Of such a step with an entry for each row (`speculation/rows.py`): the request's drafts up to the row.
    preceding_drafts: list[list[int]] = field(default_factory=list)
    # How many drafts of each request its next step would verify; asked of a device drafter.
    num_drafts: int = 0
    # Whether a device drafter runs in it, if only to keep up with its tokens.
    runs_drafter: bool = False

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(self.num_new_tokens) + sum(map(len, self.drafts))

    @property
    def is_uniform_decode(self) -> bool:
        """True when every request computes exactly one token (what a captured graph needs)."""
        return self.num_new_tokens.count(1) == len(self.num_new_tokens)


class Dummy(enum.Enum):
    """What rows of padding point at; the engine that captures graphs knows which slots these are."""

    SLOT = "the row of the token pool that no request has"
    STATE = "the slot of linear-attention states that no request has"


class Feature(enum.Enum):
    """What only some models have; steps of the others leave its tensors out."""

    MROPE = "rotary embedding of positions in time, height and width"
    LINEAR_ATTENTION = "layers with a state per request"


@dataclass(frozen=True, slots=True)
class TensorField:
    """Declares a tensor of a record.

    `shape`: its axes, a letter or a number each. T = tokens, R = requests, S = rows that are sampled from,
    P = pages of the longest request; in a captured graph T = R = S. Other letters are the record's own.
    """

    shape: str
    dtype: torch.dtype
    # It differs between two replays of a captured graph, which reads it from memory that stays.
    captured: bool = False
    # Captured: what rows of padding hold,
    padding: int | Dummy = 0
    # and a constant that rows of requests hold; None: what the plan has for them.
    valid: int | None = None
    # Which models' graphs read it; None: all.
    feature: Feature | None = None
    # Computed on the device by the model runner; in a plan of the host it is empty.
    on_device: bool = False

    def sizes(self, axes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape with sizes instead of letters."""
        return tuple(axes[axis] if axis in axes else int(axis) for axis in self.shape.split())


@dataclass(frozen=True, slots=True)
class DepthRows:
    """Rows of a step with drafts: requests' own tokens, or their first drafts, or their second ones, ..."""

    rows: list[int]
    index: Annotated[Tensor, TensorField("N", int64)]  # The same.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardInputs:
    """What the layers of a model read. Row order: requests in batch order, each one's tokens by position."""

    # Gathered from the token pool, so that the host need not know the token that an earlier step samples.
    input_ids: Annotated[Tensor, TensorField("T", int64, on_device=True)]
    positions: Annotated[Tensor, TensorField("T", int64, captured=True)]
    # page * page_size + offset of each new token's KV.
    slot_mapping: Annotated[Tensor, TensorField("T", int64, captured=True)]
    # Padded with the dummy page 0.
    block_table: Annotated[Tensor, TensorField("R P", int32, captured=True)]
    # [R + 1], first row of each request.
    query_start_loc: list[int]
    # [R], KV length after this step (start + new).
    seq_lens: list[int]
    # Rows of hidden_states that go through the head.
    logits_indices: Annotated[Tensor, TensorField("S", int64)]
    # The two lists above, for kernels.
    query_start_loc_tensor: Annotated[Tensor, TensorField("R+1", int32)]
    seq_lens_tensor: Annotated[Tensor, TensorField("R", int32, captured=True, padding=1)]
    # Positions in time, height and width; None: the model has no mRoPE.
    mrope_positions: Annotated[
        Tensor | None, TensorField("3 T", int64, captured=True, feature=Feature.MROPE)
    ] = None
    # Position after the last one that each row sees in layers with a window, where the tokens of an image see
    # one another; None: every row sees what is before it.
    visible_ends: Annotated[Tensor | None, TensorField("T", int64)] = None
    # What image tokens of the step are in the residual stream; None: there are none.
    image_features: ImageFeatures | None = None
    # Slots of `StateSlots`, no slot both read and written but as `depths` says; None: the model keeps none.
    # Padding starts from the state of zeros, slot 0.
    state_reads: Annotated[
        Tensor | None, TensorField("R", int64, captured=True, feature=Feature.LINEAR_ATTENTION)
    ] = None
    state_writes: Annotated[
        Tensor | None,
        TensorField("R", int64, captured=True, padding=Dummy.STATE, feature=Feature.LINEAR_ATTENTION),
    ] = None
    # Of a model with states, where a step has drafts: all rows, each depth reading what the one before wrote.
    # Empty: no row's state is another row's of the step.
    depths: list[DepthRows] = field(default_factory=list)
    # False for rows that only pad a batch to a graph's size; they choose no experts. None: no such rows.
    valid_rows: Annotated[Tensor | None, TensorField("T", boolean, captured=True, valid=1)] = None

    @property
    def is_uniform_decode(self) -> bool:
        """True when every request computes exactly one token."""
        return self.query_start_loc[-1] == len(self.seq_lens)

    def check(self, page_size: int) -> None:
        """Raises ValueError when the inputs contradict themselves or exceed the block table."""
        starts, seq_lens, rows = self.query_start_loc, self.seq_lens, self.slot_mapping.shape[0]
        if len(starts) != len(seq_lens) + 1 or starts[-1] != rows:
            raise ValueError(f"step of {rows} rows and {len(seq_lens)} requests has query_start_loc {starts}")
        capacity = self.block_table.shape[1] * page_size
        if seq_lens and max(seq_lens) > capacity:
            raise ValueError(f"sequence of {max(seq_lens)} tokens exceeds its block table of {capacity}")


@dataclass(frozen=True, slots=True)
class SlotUpload:
    """Known tokens of a request that was given a slot in this step."""

    slot: int
    token_ids: Annotated[Tensor, TensorField("N", int32)]  # prompt, then output
    prompt_len: int
    has_penalties: bool


@dataclass(frozen=True, slots=True)
class Drafts:
    """D drafts that a step verifies, of Q requests, all of which sample; filled by `speculation/rows.py`."""

    slots: Annotated[Tensor, TensorField("D", int64)]  # rows of the token pool
    positions: Annotated[Tensor, TensorField("D", int64)]
    token_ids: Annotated[Tensor, TensorField("D", int64)]
    # The same by request, padded with -1, and which of the S rows is each request's first one.
    expected: Annotated[Tensor, TensorField("Q K", int64)]
    first_rows: Annotated[Tensor, TensorField("Q", int64)]
    counts: list[int]  # [Q]

    @property
    def owners(self) -> list[int]:
        """[Q], `first_rows` for the host."""
        return [0, *itertools.accumulate(1 + count for count in self.counts[:-1])]


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """Rows of one request whose logits score the next prompt token."""

    batch_index: int
    rows: Annotated[Tensor, TensorField("N", int64)]  # rows of hidden_states
    target_ids: Annotated[Tensor, TensorField("N", int64)]
    start: int  # position of target_ids[0]
    num_top: int


@dataclass(frozen=True, slots=True)
class PooledRows:
    """Rows of one request's prompt whose hidden states are pooled."""

    batch_index: int
    rows: Annotated[Tensor, TensorField("N", int64)]  # rows of hidden_states
    from_start: bool  # whether the prompt's first token is computed in this step


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Rows with any penalty."""

    rows: Annotated[Tensor, TensorField("N", int64)]  # rows of the logits
    slots: Annotated[Tensor, TensorField("N", int64)]  # rows of the counts
    repetition: Annotated[Tensor, TensorField("N 1", float32)]
    presence: Annotated[Tensor, TensorField("N 1", float32)]
    frequency: Annotated[Tensor, TensorField("N 1", float32)]
    # Of rows of drafts, the request's drafts up to the row, padded with -1; its rows are consecutive.
    preceding_drafts: Annotated[Tensor, TensorField("N K", int64)]


@dataclass(frozen=True, slots=True)
class SparseBias:
    """Additions to single logits."""

    rows: Annotated[Tensor, TensorField("N", int64)]
    token_ids: Annotated[Tensor, TensorField("N", int64)]
    values: Annotated[Tensor, TensorField("N", float32)]


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Rows of which only some logits are kept."""

    rows: Annotated[Tensor, TensorField("A", int64)]
    # One of `rows` and an id for each of N logits that are kept.
    entry_rows: Annotated[Tensor, TensorField("N", int64)]
    token_ids: Annotated[Tensor, TensorField("N", int64)]


@dataclass(frozen=True, slots=True)
class BadWords:
    """N sequences of tokens that outputs must not complete, each of one row."""

    rows: Annotated[Tensor, TensorField("N", int64)]
    last_ids: Annotated[Tensor, TensorField("N", int64)]
    slots: Annotated[Tensor, TensorField("N", int64)]  # rows of the token pool
    # The ids before the last one, and where in the token pool they are; -1 and 0 where a sequence is short.
    prefixes: Annotated[Tensor, TensorField("N K", int64)]
    positions: Annotated[Tensor, TensorField("N K", int64)]


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Rows whose requests have constraints; filled by `token_masks.py`."""

    rows: Annotated[Tensor, TensorField("N", int64)]  # rows of the logits
    # Bit b of word w says whether token 32 w + b is allowed.
    words: Annotated[Tensor, TensorField("N W", int32)]


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Filled by `SampledRows.plan`. None or an empty list: no request of the batch needs it."""

    temperature: Annotated[Tensor, TensorField("S", float32)]  # 0 marks greedy rows
    random_rows: Annotated[Tensor, TensorField("N", int64)]  # rows that are not greedy
    uniform: Annotated[Tensor, TensorField("N", float64)]  # in [0, 1)
    top_k: Annotated[Tensor, TensorField("N", int64)]  # 0 keeps all
    top_p: Annotated[Tensor, TensorField("N", float64)]
    min_p: Annotated[Tensor, TensorField("N", float32)]
    # Which of the N rows have top-k or top-p; known to the host, so that no device need be asked.
    truncated: Annotated[Tensor, TensorField("C", int64)]
    bias: SparseBias | None
    banned: SparseBias | None  # values are -inf
    penalties: PenaltyRows | None
    logprob_rows: list[int]
    logprob_index: Annotated[Tensor, TensorField("L", int64)]  # the same
    num_top_logprobs: int
    allowed: AllowedTokens | None = None
    bad_words: BadWords | None = None
    # Ids that are scored in addition to the best ones, padded with 0.
    scored_ids: Annotated[Tensor | None, TensorField("L M", int64)] = None
    masks: TokenMasks | None = None
    # The masks follow when the tokens of the step before are known: until then nothing is sampled.
    awaits_masks: bool = False

    def logprob_columns(self, vocab_size: int) -> int:
        """Returns the number of ids that a logprob row has values of, besides the chosen one."""
        extra = 0 if self.scored_ids is None else self.scored_ids.shape[1]
        return min(self.num_top_logprobs, vocab_size) + extra

    @property
    def takes_argmax(self) -> bool:
        """Returns whether every row's token is that of its largest logit, and nothing else is asked."""
        changed = (self.bias, self.banned, self.penalties, self.allowed, self.bad_words, self.masks)
        is_plain = changed.count(None) == len(changed) and not self.awaits_masks
        return is_plain and not self.logprob_rows and self.random_rows.numel() == 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan(ForwardInputs):
    """A whole step, filled by the input builder; a launched step looks at no request any more.

    Immutable, so that a step whose experts were lost can be run again from the same plan.
    """

    uploads: list[SlotUpload]
    # Row of the token pool of each input token.
    token_slots: Annotated[Tensor, TensorField("T", int64, captured=True, padding=Dummy.SLOT)]
    # [S], index into the batch.
    sample_batch_indices: list[int]
    # Where the sampled tokens go in the token pool.
    sample_slots: Annotated[Tensor, TensorField("S", int64, captured=True, padding=Dummy.SLOT)]
    sample_positions: Annotated[Tensor, TensorField("S", int64, captured=True)]
    # None: no row is sampled from.
    sampling: SamplingPlan | None = None
    prompt_logprobs: list[PromptLogprobRows] = field(default_factory=list)
    pooled: list[PooledRows] = field(default_factory=list)
    # Per logprob row: alternatives, and ids scored in addition.
    num_top_logprobs: list[int] = field(default_factory=list)
    num_scored_ids: list[int] = field(default_factory=list)
    # The parent of this step's expert spans; None: no spans are recorded.
    trace_context: Context | None = None
    # None: no token of the step is part of an image.
    images: ImagePlan | None = None
    # Written to the token pool before the step; every one has a row. None: the step verifies none.
    drafts: Drafts | None = None
    # As in `Batch`.
    num_drafts: int = 0
    runs_drafter: bool = False

    @property
    def num_requests(self) -> int:
        """R; every draft counts as a request."""
        return len(self.seq_lens)

    @property
    def awaits_masks(self) -> bool:
        """Returns whether the step is launched in two parts, what is sampled after its masks are known."""
        return self.sampling is not None and self.sampling.awaits_masks

    def with_masks(self, masks: TokenMasks | None) -> StepPlan:
        """Returns the same step once its masks are known; None: no row has one."""
        assert self.sampling is not None
        return dataclasses.replace(
            self, sampling=dataclasses.replace(self.sampling, masks=masks, awaits_masks=False)
        )

    @property
    def is_sampling_decode(self) -> bool:
        """Returns whether every request computes exactly one token, which is text, and samples the next."""
        rows = len(self.seq_lens)
        one_each = self.query_start_loc[-1] == len(self.sample_batch_indices) == rows
        return one_each and not (self.prompt_logprobs or self.pooled) and self.images is None


# In a plan of the host, which does not know the ids.
NO_INPUT_IDS = torch.empty(0, dtype=int64)


@functools.cache
def tensor_fields(record: type) -> dict[str, TensorField]:
    """Returns the declared tensors of a dataclass by name, in order; nested records' are not among them."""
    hints = get_type_hints(record, include_extras=True)
    return {
        name: declared
        for name in (entry.name for entry in dataclasses.fields(record))
        for declared in getattr(hints[name], "__metadata__", ())
        if isinstance(declared, TensorField)
    }


def captured_fields(features: Collection[Feature]) -> dict[str, TensorField]:
    """Returns what differs between two replays of a graph of a model with these features.

    Tensors as wide as the step's block table come last, so that the others keep their places in a packed
    buffer.
    """
    chosen = {
        name: declared
        for name, declared in tensor_fields(StepPlan).items()
        if declared.captured and (declared.feature is None or declared.feature in features)
    }
    return dict(sorted(chosen.items(), key=lambda item: "P" in item[1].shape.split()))


def graph_rows(
    fields: Mapping[str, TensorField],
    size: int,
    dummies: Mapping[Dummy, int],
    plan: StepPlan | None = None,
    num_pages: int = 1,
) -> dict[str, Tensor]:
    """Returns host tensors of `captured_fields` for a graph of `size` rows: the plan's, then padding.

    Without a plan all rows are padding, with `num_pages` columns of pages.
    """
    count = 0 if plan is None else plan.num_requests
    columns = num_pages if plan is None else plan.block_table.shape[1]
    axes = {"T": size, "R": size, "S": size, "P": columns}
    rows = {}
    for name, declared in fields.items():
        if plan is not None and count == size and declared.valid is None:
            rows[name] = getattr(plan, name)
            continue
        padding = declared.padding
        value = dummies[padding] if isinstance(padding, Dummy) else padding
        full = torch.full(declared.sizes(axes), value, dtype=declared.dtype)
        if declared.valid is not None:
            full[..., :count] = declared.valid
        elif plan is not None:
            own: Tensor = getattr(plan, name)
            full[tuple(map(slice, own.shape))] = own
        rows[name] = full
    return rows


def graph_plan(rows: Mapping[str, Tensor], size: int, input_ids: Tensor) -> StepPlan:
    """Returns the step that a graph of `size` requests computes, on the memory of `graph_rows` on
    the device.
    """
    device = input_ids.device
    return StepPlan(
        input_ids=input_ids,
        query_start_loc=list(range(size + 1)),
        seq_lens=[1] * size,
        logits_indices=torch.arange(size, device=device),
        query_start_loc_tensor=torch.arange(size + 1, dtype=int32, device=device),
        uploads=[],
        sample_batch_indices=list(range(size)),
        **dict[str, Any](rows),
    )


def tensors_of(tree: object) -> list[Tensor]:
    """Returns all tensors of a record, a list or a tuple of them, in the order of fields and elements."""
    return _walk(tree, [])


def with_tensors(tree: Tree, tensors: list[Tensor]) -> Tree:
    """Returns the same tree with other tensors, as many as `tensors_of` returns; everything else is
    shared.
    """
    replacements = iter(tensors)
    rebuilt: Tree = _map(tree, lambda _: next(replacements))
    return rebuilt


@functools.cache
def _holders(record: Any) -> tuple[str, ...]:
    """Returns the names of the fields whose declared types hold tensors that travel between host
    and device.
    """
    hints = get_type_hints(record)
    stays = {name for name, declared in tensor_fields(record).items() if declared.on_device}
    return tuple(f.name for f in dataclasses.fields(record) if f.name not in stays and _holds(hints[f.name]))


@functools.cache
def _names(record: Any) -> tuple[str, ...]:
    return tuple(entry.name for entry in dataclasses.fields(record))


def _holds(hint: Any) -> bool:
    if get_origin(hint) is None and isinstance(hint, type):
        return issubclass(hint, Tensor) or (dataclasses.is_dataclass(hint) and bool(_holders(hint)))
    return any(_holds(argument) for argument in get_args(hint))


def _walk(tree: Any, found: list[Tensor]) -> list[Tensor]:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif isinstance(tree, (list, tuple)):
        for element in tree:
            _walk(element, found)
    elif tree is not None:
        for _, value in _held(tree):
            _walk(value, found)
    return found


def _held(tree: Any) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(tree, name)) for name in _holders(tree.__class__))


def _map(tree: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    if tree is None or isinstance(tree, Tensor):
        return tree if tree is None else replace(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([_map(element, replace) for element in tree])
    changes = {name: _map(value, replace) for name, value in _held(tree) if value is not None}
    copied = object.__new__(tree.__class__)  # a constructor would take several times as long
    for name in _names(tree.__class__):
        object.__setattr__(copied, name, changes[name] if name in changes else getattr(tree, name))
    return copied


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
