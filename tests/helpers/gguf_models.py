"""Tiny models of every family that GGUF files are read of, with rows that blocks divide."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tests.helpers.gguf_files import GgufTypes, write_gguf
from tests.helpers.tables import read_table
from tests.helpers.tiny_models import TinyModel, write_tiny_model


@dataclass(frozen=True)
class GgufModelCase:
    """One file: a configuration of transformers and the types its tensors are stored in."""

    model_type: str
    types: GgufTypes
    changes: dict[str, Any] = field(default_factory=dict)
    latent_split: bool = True
    max_tensors: int = 0
    prediction_layer: bool = False
    # In gguf.MODEL_ARCH; empty: the family's first.
    architecture: str = ""
    fused: bool = False


def _read_cases() -> Iterator[tuple[str, GgufModelCase]]:
    own = {each.name for each in fields(GgufModelCase)} - {"changes", "types"}
    for model_type, cases in read_table("tiny_gguf_models.yaml").items():
        for name, found in cases.items():
            types = GgufTypes(**found.pop("types"))
            chosen = {key: found.pop(key) for key in own & found.keys()}
            yield name, GgufModelCase(model_type, types, found, **chosen)


CASES = dict(_read_cases())


@dataclass(frozen=True)
class GgufFile:
    """Filled by `make_gguf`."""

    # The file, or the first of its parts.
    path: Path
    # The same model's config.json lies here; its weights are those before they were quantised.
    published: Path
    # Transformers' model with the weights that the file says.
    reference: Any


def make_gguf(name: str, root: Path) -> GgufFile:
    """Writes the case's file, or its parts, below `root`."""
    case, published, directory = CASES[name], root / f"{name}-published", root / name
    directory.mkdir(parents=True)
    tiny = TinyModel(case.model_type, case.changes)
    reference = write_tiny_model(tiny, published, seed=sum(name.encode()))
    path = directory / f"{name}.gguf"
    write_gguf(
        reference,
        path,
        case.types,
        latent_split=case.latent_split,
        max_tensors=case.max_tensors,
        prediction_layer=case.prediction_layer,
        architecture=case.architecture,
        fused=case.fused,
    )
    return GgufFile(min(directory.iterdir()), published, reference)


def cached_gguf_files(root: Path) -> Callable[[str], GgufFile]:
    """`name -> file`, each made once under `root`."""
    return cache(lambda name: make_gguf(name, root))


@torch.inference_mode()
def reference_logits(reference: Any, tokens: list[int]) -> torch.Tensor:
    """Returns float32 `[tokens, vocabulary]`."""
    logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits
