"""What a model is, by its configuration and the headers of its files: what `moebius show` prints."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from app.sizes import size
from moebius.checkpoint.config_file import read_json
from moebius.checkpoint.gguf.files import companion_directory, is_gguf
from moebius.checkpoint.index import has_weights, open_safetensors
from moebius.models.geometry import MoeGeometry
from moebius.models.read import read_model_config

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_ROUTED = re.compile(r"\.experts\.|_exps\.")
# Types of safetensors that hold several weights in an element: how many is not in the header.
_PACKED = frozenset({"I32", "U32", "I8", "U8"})
_FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---\s", re.S)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a header has it; `shape` outermost axis first."""

    name: str
    type: str  # of safetensors or ggml: BF16, F8_E4M3, Q4_K
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class TensorKind:
    """The tensors whose names differ only in numbers of layers and experts."""

    name: str  # with * for those numbers
    types: dict[str, int]  # How many tensors have each type.
    shape: tuple[int, ...]  # Of values; empty where they differ.
    nbytes: int


@dataclass(frozen=True)
class ModelSummary:
    """Filled by `summarise`; what is not known is None, or an empty text."""

    model: str
    architecture: str
    layers: int
    moe_layers: int
    experts: int
    experts_per_token: int
    hidden_size: int
    vocabulary: int
    context_length: int  # tokens
    parameters: int | None  # None: weights are packed in a way that headers do not tell.
    routed_parameters: int | None  # of routed experts
    active_parameters: int | None  # that one token uses
    has_vision: bool
    has_chat_template: bool
    licence: str
    nbytes: int
    tensors: list[TensorKind]


def stored_tensors(path: Path) -> Iterator[StoredTensor]:
    """Yields the tensors of a directory or GGUF model, by its headers; none of a configuration alone.

    Raises CheckpointError.
    """
    if is_gguf(path):
        from moebius.checkpoint.gguf.model import open_gguf

        for blocks in open_gguf(path).tensors.values():
            yield StoredTensor(blocks.name, blocks.type.name, blocks.shape, blocks.nbytes)
    elif has_weights(path):
        for info in open_safetensors(path).tensors.values():
            yield StoredTensor(info.name, info.dtype, info.shape, info.nbytes)


def summarise(model: str, path: Path, tensors: Iterable[StoredTensor], licence: str = "") -> ModelSummary:
    """Returns what is known of the model at `path`, called `model`, with these tensors.

    `licence`: as the hub has it; empty: as the files say. Raises CheckpointError or ModelConfigError.
    """
    config = read_model_config(path)
    geometry = MoeGeometry.of(config)
    stored = list(tensors)
    is_packed = not stored or any(one.type in _PACKED and len(one.shape) > 1 for one in stored)
    parameters = None if is_packed else sum(math.prod(one.shape) for one in stored)
    routed = sum(math.prod(one.shape) for one in stored if _ROUTED.search(one.name))
    rest = None if parameters is None else parameters - routed
    return ModelSummary(
        model=model,
        architecture=config.model_type,
        layers=config.num_layers,
        moe_layers=len(geometry.moe_layers),
        experts=geometry.num_experts,
        experts_per_token=geometry.top_k,
        hidden_size=config.hidden_size,
        vocabulary=config.vocab_size,
        context_length=config.max_model_len,
        parameters=parameters,
        routed_parameters=None if rest is None else routed,
        active_parameters=None if rest is None else rest + routed * geometry.top_k // geometry.num_experts,
        has_vision=config.vision is not None,
        has_chat_template=_has_chat_template(path),
        licence=licence or _licence(path),
        nbytes=sum(one.nbytes for one in stored),
        tensors=_kinds(stored),
    )


def _kinds(tensors: Iterable[StoredTensor]) -> list[TensorKind]:
    """Returns the kinds of tensors, largest first."""
    found = defaultdict[str, list[StoredTensor]](list)
    for one in tensors:
        found[_NUMBER.sub("*", one.name)].append(one)
    kinds = [
        TensorKind(
            name,
            dict(Counter(one.type for one in same).most_common()),
            same[0].shape if len({one.shape for one in same}) == 1 else (),
            sum(one.nbytes for one in same),
        )
        for name, same in found.items()
    ]
    return sorted(kinds, key=lambda kind: (-kind.nbytes, kind.name))


def _metadata(path: Path) -> dict[str, Any]:
    """Returns a GGUF model's metadata; empty for a directory of safetensors."""
    if not is_gguf(path):
        return {}
    from moebius.checkpoint.gguf.model import open_gguf

    return dict(open_gguf(path).metadata)


def _has_chat_template(path: Path) -> bool:
    directory = companion_directory(path)
    settings = directory / "tokenizer_config.json"
    return bool(
        (directory / "chat_template.jinja").is_file()
        or (settings.is_file() and read_json(settings).get("chat_template"))
        or _metadata(path).get("tokenizer.chat_template")
    )


def _licence(path: Path) -> str:
    """Returns what a GGUF model's metadata, or the head of a model card, says."""
    if is_gguf(path):
        return str(_metadata(path).get("general.license", ""))
    card = path / "README.md"
    head = _FRONT_MATTER.match(card.read_text(encoding="utf-8", errors="replace")) if card.is_file() else None
    try:
        found = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:  # a card is for people first
        return ""
    return str(found.get("license") or "") if isinstance(found, dict) else ""


def to_json(summary: ModelSummary) -> dict[str, Any]:
    """Returns all fields."""
    return asdict(summary)


def print_summary(summary: ModelSummary, console: Console) -> None:
    """Prints facts, and a row for each kind of tensors."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="cyan", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, text in _facts(summary):
        facts.add_row(name, text)
    console.print(facts)
    if not summary.tensors:
        return
    table = Table(box=SIMPLE)
    for name in ("tensors", "types", "shape"):
        table.add_column(name, overflow="fold")
    table.add_column("GB", justify="right", no_wrap=True)
    for kind in summary.tensors:
        types = ", ".join(f"{count} {type_name}" for type_name, count in kind.types.items())
        shape = " x ".join(map(str, kind.shape)) or "several"
        table.add_row(kind.name.removesuffix(".weight"), types, shape, f"{kind.nbytes / 1e9:.3f}")
    console.print(table)


def _facts(of: ModelSummary) -> Iterator[tuple[str, str]]:
    yield "model", of.model
    yield "architecture", f"{of.architecture}{', takes images' if of.has_vision else ''}"
    experts = f"{of.experts} experts, of which a token uses {of.experts_per_token}"
    yield "layers", f"{of.layers}, {of.moe_layers} of them with {experts}"
    if of.parameters is None or of.active_parameters is None or of.routed_parameters is None:
        why = "packed weights, of which headers do not tell" if of.tensors else "no weights are here"
        yield "parameters", f"unknown: {why}"
    else:
        share = f"{of.routed_parameters / of.parameters:.0%} in routed experts"
        yield "parameters", f"{_count(of.parameters)}, {share}; a token uses {_count(of.active_parameters)}"
    yield "hidden size", f"{of.hidden_size}; vocabulary {of.vocabulary}"
    yield "context", f"{of.context_length} tokens"
    yield "chat template", "yes" if of.has_chat_template else "no"
    yield "licence", of.licence or "not said"
    yield "size", size(of.nbytes)


def _count(number: int) -> str:
    """Returns a number of parameters in billions or millions."""
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"
