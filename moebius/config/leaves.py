"""The leaves of the configuration tree, and how one leaf is read from text and described.

A leaf is one field of one section. Its name is unique over all sections, so it is also a CLI flag
(`--leaf-name`).
"""

from __future__ import annotations

import functools
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from moebius.config import MoebiusConfig, Section
from moebius.errors import ConfigError
from moebius.other_servers.values import OTHER_VALUES

TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")


@dataclass(frozen=True)
class Leaf:
    """One setting; filled by `leaves` from the pydantic model."""

    section: str
    name: str
    # The type without `None`, e.g. int, Literal["a", "b"], int | Literal["a"], or tuple[int, ...].
    annotation: Any
    optional: bool
    default: Any
    description: str
    limits: tuple[Any, ...]  # Range limits of numbers, as annotated_types objects.

    @property
    def flag(self) -> str:
        """The CLI spelling, e.g. `--max-num-seqs`."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_list(self) -> bool:
        """Returns whether the value is a list (comma separated on the command line)."""
        return typing.get_origin(self.annotation) is tuple

    @property
    def allowed(self) -> str:
        """What may stand there, in words."""
        text = _type_words(self.annotation)
        bounds = [_limit_words(limit) for limit in self.limits]
        text += "".join(f", {bound}" for bound in bounds if bound)
        return text + (", or none" if self.optional else "")

    @property
    def default_text(self) -> str:
        """The default in words: "empty" of texts and lists, "unset" for none."""
        if self.is_list:
            return ",".join(map(str, self.default)) or "empty"
        if self.default is None:
            return "unset"
        if self.annotation is bool:
            return "true" if self.default else "false"
        return str(self.default) if self.default != "" else "empty"

    @property
    def metavar(self) -> str:
        """Returns what stands for the value in `--help`."""
        if typing.get_origin(self.annotation) is Literal:
            return "|".join(map(str, typing.get_args(self.annotation)))
        if _is_union(self.annotation):
            number, words = _number_or_words(self.annotation)
            return "|".join((_METAVARS[number], *words))
        return "A,B,…" if self.is_list else _METAVARS.get(self.annotation, "TEXT")

    def arguments(self, value: Any) -> list[str]:
        """Returns the command line's words for the value; `parse` reads them."""
        if self.annotation is bool:
            return [self.flag if value else f"--no-{self.flag[2:]}"]
        text = ",".join(map(str, value)) if self.is_list else str(value)
        return [self.flag, "none" if value is None else text]

    def parse(self, text: str) -> Any:
        """The value a flag's text stands for. Raises ConfigError; ranges are checked later, by pydantic."""
        text = OTHER_VALUES.get(self.name, {}).get(text.lower(), text)
        if self.optional and text.lower() == "none":
            return None
        try:
            if self.is_list:
                item = typing.get_args(self.annotation)[0]
                return tuple(_scalar(item, part.strip()) for part in text.split(",") if part.strip())
            return _scalar(self.annotation, text)
        except ValueError:
            raise ConfigError(f"{self.flag}: {text!r} is not allowed; allowed: {self.allowed}") from None


def sections() -> dict[str, type[Section]]:
    """Returns section name -> its class, in the order of the tree."""
    return {name: typing.cast(type[Section], field.annotation) for name, field in _tree_fields()}


@functools.cache
def leaves() -> tuple[Leaf, ...]:
    """Returns every leaf of the tree, in order."""
    return tuple(
        _leaf(section, name, field)
        for section, model in sections().items()
        for name, field in model.model_fields.items()
    )


def _tree_fields() -> list[tuple[str, FieldInfo]]:
    return list(MoebiusConfig.model_fields.items())


def _leaf(section: str, name: str, field: FieldInfo) -> Leaf:
    annotation, optional = _without_none(field.annotation)
    return Leaf(
        section=section,
        name=name,
        annotation=annotation,
        optional=optional,
        default=field.default,
        description=field.description or "",
        limits=tuple(field.metadata),
    )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    """Splits `X | None` into (X, True); anything else is (itself, False)."""
    if _is_union(annotation) and type(None) in typing.get_args(annotation):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
        return kinds[0], True
    return annotation, False


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (Union, types.UnionType)


def _number_or_words(union: Any) -> tuple[Any, tuple[str, ...]]:
    """Returns the type of numbers that a union takes, without its limits, and the words."""
    words, number = tuple[str, ...](), None
    for kind in typing.get_args(union):
        if typing.get_origin(kind) is Literal:
            words += typing.get_args(kind)
        else:
            number = typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind
    return number, words


_METAVARS = {int: "INTEGER", float: "NUMBER"}
# As vLLM reads them: 32K tokens are 32768, 32k are 32000.
_UNITS = {"k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}
_COUNT = re.compile(r"(\d+)([kmKM])")


def _scalar(kind: Any, text: str) -> Any:
    """Returns one value of a plain type from text; raises ValueError. Literals are checked by pydantic.

    A union is a number or one of some words.
    """
    if _is_union(kind):
        number, words = _number_or_words(kind)
        return text if text in words else _scalar(number, text)
    if kind is bool:
        lowered = text.lower()
        if lowered not in TRUE_WORDS + FALSE_WORDS:
            raise ValueError(text)
        return lowered in TRUE_WORDS
    if kind is int and (found := _COUNT.fullmatch(text)) is not None:
        return int(found[1]) * _UNITS[found[2]]
    if kind in (int, float):
        return kind(text)
    return text


def _type_words(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in typing.get_args(kind))
    if _is_union(kind):
        return ", or ".join(_type_words(one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is Annotated:
        base, *limits = typing.get_args(kind)
        return ", ".join([_type_words(base), *map(_limit_words, limits)])
    if typing.get_origin(kind) is tuple:
        return f"a list, each {_type_words(typing.get_args(kind)[0])}"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[kind]


def _limit_words(limit: Any) -> str:
    match limit:
        case Ge(ge=bound):
            return f">= {bound}"
        case Gt(gt=bound):
            return f"> {bound}"
        case Le(le=bound):
            return f"<= {bound}"
        case Lt(lt=bound):
            return f"< {bound}"
    return ""


def explain(error: ValidationError, origin: Mapping[str, str]) -> list[str]:
    """Returns a line for each setting that the tree refuses: its origin, its value and what is allowed.

    `origin`: leaf name to where its value was given; others are called by their name.
    """
    known = {leaf.name: leaf for leaf in leaves()}
    lines = dict[str, str]()
    for found in error.errors(include_url=False):
        name = str(found["loc"][1])
        # A validator of ours says it more exactly than the type does.
        is_ours = found["type"] == "value_error"
        allowed = str(found["ctx"]["error"]) if is_ours else f"allowed: {known[name].allowed}"
        lines.setdefault(name, f"{origin.get(name, name)}: {found['input']!r} is not allowed; {allowed}")
    return list(lines.values())
