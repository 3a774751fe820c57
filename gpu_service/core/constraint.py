"""Enforces the `Constraint` of an output: which tokens may come next, token by token.

    OPENING -> THOUGHT -> FORCED -> GRAMMAR, or FREE where there is no grammar

An output without a thought begins with its grammar. Knows no tensors and no steps: the masks are filled by
`engine/token_masks.py`, and a token is accepted when its step is committed, so an output's state is that of
its `output_token_ids`, whatever happened to the steps.
"""

from __future__ import annotations

import base64
import copy
import enum
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from moebius.checkpoint.tokenizer import has_tokenizer, read_backend
from moebius.errors import brief
from moebius.grammar.compile import GrammarError, grammar_of, limits, reason
from moebius.process.progress import phase
from protos.engine_pb2 import Constraint

_log = structlog.get_logger(__name__)
Words = npt.NDArray[np.int32]
# Compiled grammars that are kept for later requests.
_REMEMBERED = 64


class Phase(enum.Enum):
    """Where an output is."""

    OPENING = "its first tokens say whether it begins with a thought"
    THOUGHT = "anything, until the thought ends"
    FORCED = "the end of a thought that became too long"
    GRAMMAR = "what the grammar allows"
    FREE = "anything, to the end"


class OutputConstraint:
    """One output's; made by `ConstraintCompiler`, advanced by the scheduler's commit."""

    def __init__(
        self, source: Constraint, matcher: LLMatcher | None, eos_token_ids: frozenset[int], num_words: int
    ) -> None:
        """`matcher`: this output's own, at its beginning; None: the constraint has no grammar. `num_words`:
        of a mask."""
        self.source = source
        self.num_words = num_words
        self.matcher = matcher
        self.error = ""  # not empty: the output cannot go on, and why
        self.is_complete = False
        # Filled by `engine/token_masks.py`: its latest mask took long; the next one, computed by a thread.
        self.is_slow = False
        self.ahead: Future[Words] | None = None
        self._eos = sorted(eos_token_ids)
        self._start, self._after = tuple(source.start_token_ids), tuple(source.after_token_ids)
        self._forced = tuple(source.forced_token_ids) or self._after
        self._limit = source.max_reasoning_tokens if source.HasField("max_reasoning_tokens") else None
        self._count = 0  # tokens accepted
        self._place = 0  # in the sequence that the output is to open with, or that is forced
        self._recent: tuple[int, ...] = ()  # the thought's latest, at most as many as end it
        self.phase = self._after_thought
        if self._start:
            self.phase = Phase.OPENING
        elif self._after:
            self._enter_thought()

    @property
    def _after_thought(self) -> Phase:
        return Phase.FREE if self.matcher is None else Phase.GRAMMAR

    def depends_on(self, unknown: int) -> bool:
        """Whether the mask depends on `unknown` tokens that are being sampled and have not been accepted."""
        if unknown == 0 or self.phase is Phase.FREE:
            return False
        if self.phase is Phase.THOUGHT and self.matcher is None:
            return self._limit is not None and self._count + unknown >= self._limit
        return True

    @property
    def num_accepted(self) -> int:
        """Tokens of the output so far."""
        return self._count

    def after(self, token_id: int) -> OutputConstraint | None:
        """A copy that has accepted one token more; None: the constraint refuses it, or the output ends."""
        ahead = copy.copy(self)
        ahead.matcher = None if self.matcher is None else self.matcher.deep_copy()
        ahead.accept(token_id)
        return None if ahead.error or ahead.is_complete else ahead

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of the tokens, one after the other, it would accept, as far as its grammar says."""
        if self.phase is not Phase.GRAMMAR or self.matcher is None:
            return len(token_ids)
        return self.matcher.validate_tokens(token_ids)

    @property
    def follows_grammar(self) -> bool:
        """Returns whether the mask is the matcher's; `finish_mask` comes after it all the same."""
        is_undecided = self.phase is Phase.OPENING and self._place == 0
        return self.matcher is not None and (self.phase is Phase.GRAMMAR or is_undecided)

    def accept(self, token_id: int) -> None:
        """The output's next token. Sets `error` when it breaks the grammar, `is_complete` at its end."""
        self._count += 1
        self.ahead = None
        if self.phase is Phase.OPENING:
            self._open(token_id)
        elif self.phase is Phase.THOUGHT:
            self._think(token_id)
        elif self.phase is Phase.FORCED:
            self._place += 1
            if self._place == len(self._forced):
                self.phase = self._after_thought
        elif self.phase is Phase.GRAMMAR:
            self._consume(token_id)

    def finish_mask(self, words: Words, banned: frozenset[int]) -> bool:
        """Completes a mask int32 `[W]` that allows everything, or what the matcher said.

        `banned`: ids that are left out wherever others remain. False: it allows everything. Sets `error`
        when nothing is allowed; then the mask allows everything, and the output's token means nothing.
        """
        if self.phase is Phase.FORCED or (self.phase is Phase.OPENING and self._place > 0):
            words[:] = 0
            _allow(words, (self._forced if self.phase is Phase.FORCED else self._start)[self._place])
            return True
        if self.phase is Phase.OPENING:
            _allow(words, self._start[0])
        elif self.phase is Phase.THOUGHT and self.matcher is not None:
            _ban(words, self._eos)  # it would end before there is an answer
        follows_grammar = self.follows_grammar
        if follows_grammar and self.matcher is not None and self.matcher.is_error():
            self._fail()
        elif not words.any():
            self.error = self.error or "the constraint allows no token that the model has"
        if self.error:
            words[:] = -1
            return False
        present = [token_id for token_id in banned if words[token_id >> 5] >> (token_id & 31) & 1]
        if present:
            kept = words.copy()
            _ban(kept, present)
            if kept.any():
                words[:] = kept
        # A grammar that allows everything is hardly worth looking for.
        return follows_grammar or bool((words != -1).any())

    def _open(self, token_id: int) -> None:
        if token_id == self._start[self._place]:
            self._place += 1
            if self._place == len(self._start):
                self._enter_thought()
            return
        self.phase = self._after_thought
        if self.phase is Phase.GRAMMAR:
            self._consume(token_id)

    def _enter_thought(self) -> None:
        self.phase, self._place = Phase.THOUGHT, 0
        self._bound_thought()

    def _think(self, token_id: int) -> None:
        self._recent = (*self._recent, token_id)[-len(self._after) :]
        if self._recent == self._after:
            self.phase = self._after_thought
        else:
            self._bound_thought()

    def _bound_thought(self) -> None:
        if self._limit is not None and self._count >= self._limit:
            self.phase, self._place = Phase.FORCED, 0

    def _consume(self, token_id: int) -> None:
        assert self.matcher is not None
        if not self.matcher.consume_token(token_id) or self.matcher.is_error():
            self._fail()
        else:
            self.is_complete = self.matcher.is_stopped()

    def _fail(self) -> None:
        assert self.matcher is not None
        self.error = f"the output cannot follow its constraint: {reason(self.matcher.get_error())}"


def _allow(words: Words, token_id: int) -> None:
    words[token_id >> 5] |= np.array(1 << (token_id & 31), np.uint32).view(np.int32)


def _ban(words: Words, token_ids: list[int]) -> None:
    for token_id in token_ids:
        words[token_id >> 5] &= np.array(~(1 << (token_id & 31)) & 0xFFFFFFFF, np.uint32).view(np.int32)


# The engine's operation that has every rank compile a constraint before a request needs it.
PREPARE = "prepare constraint"


class ConstraintCompiler:
    """Makes constraints of outputs; remembers the latest grammars. Any thread may ask; it takes a while."""

    # Tells other ranks of a constraint that is about to be compiled, as the argument of `PREPARE`.
    announce: Callable[[str], object] | None = None
    # Gives llguidance's grammar within a budget of time and memory. On rank 0 only, where requests come in:
    # what it accepts is compiled on all ranks, whatever the time is that one of them needs.
    vet: Callable[[Constraint], str] = staticmethod(grammar_of)

    def __init__(
        self,
        read: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: frozenset[int],
        remembered: int = _REMEMBERED,
    ) -> None:
        """`read` is called for the first constraint, which waits for it, or by `load`. `vocab_size`: columns
        of the logits, which may be more than there are tokens, or fewer."""
        self._read, self._vocab_size, self._eos = read, vocab_size, eos_token_ids
        self._remembered = remembered
        self._compiled: OrderedDict[bytes, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="constraints")

    def load(self) -> None:
        """Reads the tokenizer now. Raises GrammarError saying why it cannot be read."""
        _ = self._tokenizer

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            tokenizer = self._read()
            size = max(self._vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
            return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=sorted(self._eos) or None)
        except Exception as error:  # of a file, or of a library that does not know this kind of tokenizer
            raise GrammarError(f"constraints of outputs are refused: no tokenizer: {brief(error)}") from error

    @property
    def num_words(self) -> int:
        """The number of words of a mask."""
        return -(-self._tokenizer.vocab_size // 32)

    def make(self, constraint: Constraint, count: int = 1) -> list[OutputConstraint]:
        """Returns the constraints of `count` outputs. Raises GrammarError when it cannot be enforced."""
        if constraint.WhichOneof("kind") is None:
            return [OutputConstraint(constraint, None, self._eos, self.num_words) for _ in range(count)]
        beginning = self._matcher(constraint)
        with self._lock:
            matchers = [beginning.deep_copy() for _ in range(count)]
        return [OutputConstraint(constraint, one, self._eos, self.num_words) for one in matchers]

    def prepare(self, text: str) -> None:
        """Compiles what another rank has announced, in a thread: `make` will find it, or wait for it."""
        constraint = Constraint.FromString(base64.b64decode(text))
        self._pool.submit(self._matcher, constraint)

    def _matcher(self, constraint: Constraint) -> LLMatcher:
        """The matcher at the beginning of an output, which is shared and must not be advanced."""
        key = hashlib.sha256(constraint.SerializeToString(deterministic=True)).digest()
        with self._lock:
            compiled = self._compiled.get(key)
            is_new = compiled is None
            if compiled is None:
                compiled = self._compiled[key] = Future()
                if len(self._compiled) > self._remembered:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
        if is_new:
            try:
                grammar = self.vet(constraint)
                if self.announce is not None:
                    self.announce(base64.b64encode(constraint.SerializeToString()).decode())
                compiled.set_result(self._compile(grammar))
            except Exception as error:  # it is raised again in everybody who waits
                compiled.set_exception(error)
                with self._lock:
                    self._compiled.pop(key, None)
        return compiled.result()

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
        # The first masks, too: they are the most expensive ones, and show whether the grammar is too complex.
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_bitmask()
            first.consume_tokens(first.compute_ff_tokens())
            first.compute_bitmask()
            if first.is_error():
                matcher = first
        if matcher.is_error():
            raise GrammarError(reason(matcher.get_error()))
        return matcher


def make_compiler(
    model: Path, vocab_size: int, eos_token_ids: Iterable[int], confirm: Callable[[], None] | None = None
) -> ConstraintCompiler | None:
    """Returns the compiler for a checkpoint; None, with a warning, where it has no tokenizer.

    With `confirm` the tokenizer, half a second and 50 MB of a start on a CPU alone, waits for the first
    constraint, and `confirm` raises when the files have changed by then. Without, it is read now: llguidance
    holds Python's lock meanwhile, which would stop a GPU's steps.
    """

    def read() -> Tokenizer:
        tokenizer = read_backend(model)
        if confirm is not None:
            confirm()
        return tokenizer

    compiler = ConstraintCompiler(read, vocab_size, frozenset(eos_token_ids))
    try:
        if confirm is None:
            with phase("reading the tokenizer"):
                compiler.load()
        elif not has_tokenizer(model):
            raise GrammarError(f"constraints of outputs are refused: {model} has no tokenizer")
    except GrammarError as error:
        _log.warning(str(error))
        return None
    return compiler
