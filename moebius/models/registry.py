"""Every family, by `model_type` and by GGUF architecture; the modules in `families` are all there is."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from moebius.checkpoint.errors import CheckpointError
from moebius.checkpoint.gguf.family import GgufFamily
from moebius.models import families
from moebius.models.config import ModelConfigError
from moebius.models.dense import DENSE_FAMILIES
from moebius.models.family import Family, VisionFamily

if TYPE_CHECKING:
    # Its module loads a package that few processes need.
    from moebius.checkpoint.gguf.model import GgufModel


def _families() -> dict[str, Family]:
    """Returns the families of all modules in `families`, in the order of their names."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(families.__path__):
        for family in import_module(f"{families.__name__}.{module.name}").FAMILIES:
            assert isinstance(family, Family)
            assert family.model_type not in found, f"{family.model_type} is described twice"
            found[family.model_type] = family
    return found


FAMILIES: Mapping[str, Family] = _families()
GGUF_ARCHITECTURES = tuple(
    sorted({spec.architecture for family in FAMILIES.values() for spec in family.gguf})
)


def known_families() -> str:
    """Returns what is allowed in the place of a `model_type` that no module describes."""
    return ", ".join(sorted(FAMILIES))


def dense_refusal() -> str:
    """Returns why a dense model is not served, and what serves it."""
    return "only mixture-of-experts models are served, dense ones by llama.cpp or vLLM"


def family_of(model_type: str) -> Family:
    """Returns a family, dense ones included.

    Raises ModelConfigError for a `model_type` that no module describes, naming those that one does.
    """
    family = FAMILIES.get(model_type) or DENSE_FAMILIES.get(model_type)
    if family is None:
        raise ModelConfigError(f"model_type {model_type!r} is not supported; known: {known_families()}")
    return family


def vision_family(model_type: str) -> VisionFamily:
    """Returns the vision part of a family that has a tower. Raises ModelConfigError for any other."""
    vision = family_of(model_type).vision
    if vision is None:
        raise ModelConfigError(f"model_type {model_type!r} has no vision tower")
    return vision


def gguf_family(model: GgufModel) -> tuple[Family, GgufFamily]:
    """Returns the family that a GGUF model is of, a dense one where it has no experts; of several of one
    architecture, that of its way of gating.

    Raises CheckpointError naming an architecture that none has.
    """
    known = FAMILIES if model.value("expert_count") else DENSE_FAMILIES
    found = [
        (family, spec)
        for family in known.values()
        for spec in family.gguf
        if spec.architecture == model.architecture
    ]
    if not found and known is DENSE_FAMILIES and model.architecture in GGUF_ARCHITECTURES:
        raise CheckpointError(
            f"{model.file}: {model.architecture}.expert_count is not above 0; {dense_refusal()}"
        )
    if not found:
        raise CheckpointError(
            f"{model.file}: general.architecture is {model.architecture!r}; "
            f"allowed: {', '.join(GGUF_ARCHITECTURES)}"
        )
    gating = model.value("expert_gating_func")
    return next((pair for pair in found if pair[1].gating == gating), found[0])
