"""Writes a whole random checkpoint: configuration, tokenizer and weights.

A tokenizer for any vocabulary size: bytes, three special tokens, and made-up words.

Text is encoded byte by byte; every other id decodes to a word that names it, so that output of a random
model can be read, counted and distinguished.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from lab.random_model.gguf import GGUF_FORMATS, gguf_tensors, lay_out_gguf
from lab.random_model.glm4 import glm4_layer
from lab.random_model.glm5 import glm5_layer
from lab.random_model.replay import Replay, fit_replay, read_trace
from lab.random_model.shapes import (
    Glm4Shape,
    Glm5Shape,
    GlmShape,
    RandomShape,
    parse_shape,
)
from lab.random_model.tensors import (
    FIRST_WORD,
    ModelDraw,
    TensorGroup,
    outside_layers,
    qwen3_layer,
    write_arrays,
    write_shards,
)
from lab.random_model.topics import Topics, fitted_share
from lab.random_model.values import FORMATS, expert_format, parse_skew
from moebius.errors import UserError

SPECIAL = ("<|pad|>", "<|start|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def vocabulary_tokens(vocab_size: int) -> list[str]:
    """Returns special tokens, bytes, made-up words.

    Raises UserError for a vocabulary without room for bytes.
    """
    from tokenizers import pre_tokenizers

    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocab_size < len(tokens):
        raise UserError(f"vocabulary of {vocab_size}: at least {len(tokens)} are needed")
    # "Ġ" is a space to byte-level decoders.
    return tokens + [f"\u0120w{number}" for number in range(len(tokens), vocab_size)]


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """tokenizer.json and tokenizer_config.json of `vocab_size` tokens. Raises UserError when too few."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(vocabulary_tokens(vocab_size))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


# Written first: says what the directory is, and that it may be overwritten.
MARKER = "random_model.json"


@dataclass(frozen=True)
class RandomModelOptions:
    """Filled by the command line; names as in `SHAPES` and `FORMATS`."""

    shape: str = "qwen3-30b-a3b"
    # Of routed experts, all other weights are bfloat16; or of a whole GGUF file.
    weight_format: str = "bfloat16"
    # 0: the model's own number.
    layers: int = 0
    # Gigabytes (10^9 bytes) of weights, which leaves out layers that do not fit; 0: no limit.
    max_gb: float = 0.0
    # "none", or "zipf:S".
    skew: str = "none"
    # "random", or "chain": each token has one successor, whatever came before it.
    head: str = "random"
    # Acceptance rate, in percent, of draft tokens that MTP layers propose for a chained head.
    mtp_acceptance: int = 80
    seed: int = 0
    threads: int = 0  # 0: one per allowed CPU.
    # Of a token's experts, the percentage that the next token chooses as well, with a chained head; 0: what
    # chance gives. And how many tokens a topic lasts.
    overlap: int = 0
    topic_tokens: int = 64
    # A file of `experts record --mode per_token` whose rows the tokens of a chain choose; empty: none.
    routing_from: str = ""


@dataclass(frozen=True)
class Written:
    """What was written; filled by `write_random_model`."""

    # What `moebius serve` is given: the directory, or the GGUF file in it.
    path: Path
    nbytes: int
    seconds: float
    # None: no trace is replayed.
    replay: Replay | None = None


def write_random_model(
    directory: Path,
    options: RandomModelOptions,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Written:
    """Writes the checkpoint; `on_progress` gets bytes done and in total.

    The same options give the same bytes, however many threads write. Raises UserError: an option is not
    allowed, the directory holds something else, or there is no room.
    """
    begin = time.perf_counter()
    is_gguf = options.weight_format in GGUF_FORMATS
    shape = parse_shape(options.shape, options.layers)
    if is_gguf and not shape.has_gguf:
        allowed = ", ".join(FORMATS)
        raise UserError(
            f"--format: {options.weight_format!r} is not allowed with --shape {shape.name}; "
            f"allowed: {allowed}"
        )
    shape = _fitting(shape, options)
    experts = expert_format("bfloat16" if is_gguf else options.weight_format, others=tuple(GGUF_FORMATS))
    chained = _parse_head(options.head)
    if not 0 <= options.mtp_acceptance <= 100:
        raise UserError(f"--mtp-acceptance: {options.mtp_acceptance} is not allowed; allowed: 0 to 100")
    if options.routing_from and (options.overlap or options.skew != "none"):
        raise UserError(
            "--routing-from has the trace's routing; --overlap and --skew are not allowed with it"
        )
    topics = Topics(options.overlap, options.topic_tokens)
    if topics.is_on and (not chained or isinstance(shape, GlmShape)):
        raise UserError(
            "--overlap is allowed with --head chain, in whose order topics change, and shapes of Qwen3-MoE"
        )
    skew = parse_skew(options.skew)
    fitted_share(topics, shape.num_experts, shape.top_k, skew)  # refused before anything is written
    replay = _replay(shape, options)
    chained = chained or replay is not None
    draw = ModelDraw(shape, experts, skew, options.seed, chained, options.mtp_acceptance, topics, replay)
    write = _write_gguf if is_gguf else _write_safetensors
    path, written = write(directory, draw, options, on_progress)
    return Written(path, written, time.perf_counter() - begin, replay)


def _replay(shape: RandomShape, options: RandomModelOptions) -> Replay | None:
    """Returns the replay; None without a trace. Raises UserError for one that does not fit the shape."""
    if not options.routing_from:
        return None
    words = shape.vocab_size - FIRST_WORD
    trace = read_trace(Path(options.routing_from), shape, words)
    return fit_replay(trace, shape, options.seed, options.threads)


def shards(draw: ModelDraw) -> list[list[TensorGroup]]:
    """Returns one shard per layer, and one for embedding, final norm, head and layers of multi-token
    prediction.
    """
    layer, decoders = _layer_of(draw), draw.shape.num_layers
    layers = [list(layer(number)) for number in range(decoders)]
    outside = list(outside_layers(draw))
    for number in range(draw.shape.num_mtp_layers):
        outside += layer(decoders + number)
    return [*layers, outside]


def _layer_of(draw: ModelDraw) -> Callable[[int], Iterator[TensorGroup]]:
    match draw.shape:
        case Glm4Shape() as shape:
            return partial(glm4_layer, draw, shape)
        case Glm5Shape() as shape:
            return partial(glm5_layer, draw, shape)
    return partial(qwen3_layer, draw)


def _fitting(shape: RandomShape, options: RandomModelOptions) -> RandomShape:
    """Returns as many layers of the shape as `max_gb` allows. Raises UserError when those are too few."""
    if options.max_gb <= 0:
        return shape
    outside, layers = _layer_bytes(shape, options.weight_format)
    totals = list(itertools.accumulate(layers, initial=outside))
    fitting = sum(total <= options.max_gb * 1e9 for total in totals) - 1
    if fitting < shape.fewest_layers:
        least = totals[min(shape.fewest_layers, shape.num_layers)] / 1e9
        raise UserError(f"--max-gb: {options.max_gb:g} is not allowed; allowed: {least:.1f} or more here")
    return replace(shape, num_layers=fitting)


def _layer_bytes(shape: RandomShape, name: str) -> tuple[int, list[int]]:
    """Returns bytes outside of layers and in each, which are not drawn for that.

    Raises UserError for a format that there is not.
    """
    if name in GGUF_FORMATS:
        draws = (
            ModelDraw(replace(shape, num_layers=layers), expert_format("bfloat16"), 0.0, 0)
            for layers in (1, 2)
        )
        one, two = (sum(tensor.nbytes for tensor in gguf_tensors(draw, name)) for draw in draws)
        return 2 * one - two, [two - one] * shape.num_layers
    draw = ModelDraw(shape, expert_format(name, others=tuple(GGUF_FORMATS)), 0.0, 0)
    *layers, outside = (
        sum(spec.nbytes for group in shard for spec in group.tensors) for shard in shards(draw)
    )
    return outside, layers


def _parse_head(name: str) -> bool:
    """Returns whether it is chained. Raises UserError."""
    if name not in ("random", "chain"):
        raise UserError(f"--head: {name!r} is not allowed; allowed: random, chain")
    return name == "chain"


def _write_safetensors(
    directory: Path, draw: ModelDraw, options: RandomModelOptions, on_progress: Callable[[int, int], None]
) -> tuple[Path, int]:
    groups = shards(draw)
    total = sum(spec.nbytes for shard in groups for group in shard for spec in group.tensors)
    _prepare(directory, total, json.dumps(asdict(options)))
    write_tokenizer(directory, draw.shape.vocab_size)
    written = write_shards(directory, groups, _threads(options), _counted(total, on_progress))
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "temperature": 1.0}
    (directory / "generation_config.json").write_text(json.dumps(generation) + "\n", encoding="utf-8")
    # Last: a directory without it is no checkpoint, so an interrupted one is never taken for one.
    config = draw.shape.hf_config(draw.experts.config)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return directory, written


def _write_gguf(
    directory: Path, draw: ModelDraw, options: RandomModelOptions, on_progress: Callable[[int, int], None]
) -> tuple[Path, int]:
    """Returns one file, under its name once it is complete."""
    name = options.weight_format
    total = sum(tensor.nbytes for tensor in gguf_tensors(draw, name))
    tokens = vocabulary_tokens(draw.shape.vocab_size)
    _prepare(directory, total, json.dumps(asdict(options)))
    path = directory / f"{draw.shape.name}-{name}.gguf"
    unfinished = path.with_suffix(".unfinished")
    try:
        placed = lay_out_gguf(unfinished, draw, name, tokens, CHAT_TEMPLATE)
        write_arrays(placed, _threads(options), _counted(total, on_progress))
        unfinished.rename(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write {total / 2**30:.1f} GiB: {error.strerror}") from None
    return path, total


def _threads(options: RandomModelOptions) -> int:
    return options.threads or len(os.sched_getaffinity(0))


def _counted(total: int, on_progress: Callable[[int, int], None]) -> Callable[[int], None]:
    done = 0

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        on_progress(done, total)

    return on_bytes


def _prepare(directory: Path, total: int, marker: str) -> None:
    """An empty directory, or one that an earlier call wrote, with room for `total` bytes."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        present = list(directory.iterdir())
        if present and not (directory / MARKER).exists():
            raise UserError(
                f"DIR {directory}: is not empty; allowed: a new, an empty or an earlier random one"
            )
        for path in present:
            path.unlink()
        (directory / MARKER).write_text(marker + "\n", encoding="utf-8")
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise UserError(f"DIR {directory}: {error.strerror}") from None
    if total > free:
        raise UserError(
            f"DIR {directory}: the model takes {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; "
            "fewer --layers or another --format take less"
        )
