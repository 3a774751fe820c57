"""The leaves of the configuration tree, and how one leaf is read from text and described.

A leaf is one field of one section. Its name is unique over all sections, so it is also a CLI flag
(`--leaf-name`).
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from moebius.config import MoebiusConfig, Section
from moebius.errors import ConfigError
from moebius.other_names import OTHER_VALUES, note, other_name

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
        """Whether the value is a list (comma separated on the command line)."""
        return typing.get_origin(self.annotation) is tuple

    @property
    def allowed(self) -> str:
        """What may stand there, in words."""
        text = _type_words(self.annotation)
        bounds = [_limit_words(limit) for limit in self.limits]
        text += "".join(f", {bound}" for bound in bounds if bound)
        return text + (", or none" if self.optional else "")

    @property
    def metavar(self) -> str:
        """What stands for the value in `--help`."""
        if typing.get_origin(self.annotation) is Literal:
            return "|".join(map(str, typing.get_args(self.annotation)))
        if _is_union(self.annotation):
            kinds = typing.get_args(self.annotation)
            return "|".join(
                (
                    "INTEGER",
                    *(
                        w
                        for kind in kinds
                        if typing.get_origin(kind) is Literal
                        for w in typing.get_args(kind)
                    ),
                )
            )
        return "A,B,…" if self.is_list else {int: "INTEGER", float: "NUMBER"}.get(self.annotation, "TEXT")

    def arguments(self, value: Any) -> list[str]:
        """The command line's words for the value; `parse` reads them."""
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
    """Section name -> its class, in the order of the tree."""
    return {name: typing.cast(type[Section], field.annotation) for name, field in _tree_fields()}


def leaves() -> tuple[Leaf, ...]:
    """Every leaf of the tree, in order."""
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


# As vLLM reads them: 32K tokens are 32768, 32k are 32000.
_UNITS = {"k": 1000, "m": 1000**2, "K": 1024, "M": 1024**2}
_COUNT = re.compile(r"(\d+)([kmKM])")


def _scalar(kind: Any, text: str) -> Any:
    """One value of a plain type from text; raises ValueError. Literals are checked by pydantic.

    A union is a number or one of some words.
    """
    if _is_union(kind):
        words = [
            word
            for one in typing.get_args(kind)
            if typing.get_origin(one) is Literal
            for word in typing.get_args(one)
        ]
        return text if text in words else int(text)
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


# Leaves that had another name, by the old one.
RENAMED_LEAVES = {"exact_experts": "batch_invariant_experts", "top_k": "experts_per_token"}
# Leaves whose value is never printed.
SECRET_LEAVES = frozenset({"api_key"})


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, but a key given twice is an error instead of the last one winning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"{self.name}: key {key!r} is given twice (line {line})")
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_config(yaml_path: str | Path | None = None, flags: Mapping[str, Any] | None = None) -> MoebiusConfig:
    """The configuration of this process.

    `flags` maps leaf names to values: texts as typed on a command line, or values of the leaf's own
    type; None means that the flag was not given. Raises ConfigError.
    """
    known = {leaf.name: leaf for leaf in leaves()}
    tree: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    origin: dict[str, str] = {}
    if yaml_path:
        for leaf, value in _yaml_values(Path(yaml_path), known):
            tree[leaf.section][leaf.name] = value
            origin[leaf.name] = f"{leaf.section}.{leaf.name} in {yaml_path}"
    for name, value in (flags or {}).items():
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}{_renamed(name) or _closest(name, known)}")
        if value is not None:
            leaf = known[name]
            tree[leaf.section][name] = leaf.parse(value) if isinstance(value, str) else value
            origin[name] = leaf.flag
    try:
        return MoebiusConfig.model_validate(tree, strict=True)
    except ValidationError as error:
        raise ConfigError(_explain(error, known, origin)) from None


def _yaml_values(path: Path, known: Mapping[str, Leaf]) -> Iterable[tuple[Leaf, Any]]:
    """(leaf, value) pairs of a configuration file; lists become tuples. Raises ConfigError."""
    document = read_yaml(path)
    for section, values in document.items():
        if section not in sections() or (values is not None and not isinstance(values, dict)):
            flat = _flat_value(str(section), values, known)
            if flat is not None:
                yield from flat
                continue
        if section not in sections():
            raise ConfigError(f"{path}: unknown section {section!r}{_closest(section, sections(), known)}")
        if values is None:
            continue
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: section {section!r} must be a mapping of settings, not {values!r}")
        for name, value in values.items():
            leaf = known.get(name)
            if leaf is None:
                names = [leaf.name for leaf in known.values() if leaf.section == section]
                hint = _renamed(name) or _closest(name, names, known)
                raise ConfigError(f"{path}: unknown key '{section}.{name}'{hint}")
            if leaf.section != section:
                raise ConfigError(f"{path}: '{name}' belongs to section {leaf.section!r}, not {section!r}")
            yield leaf, tuple(value) if isinstance(value, list) else value


def _flat_value(key: str, value: Any, known: Mapping[str, Leaf]) -> list[tuple[Leaf, Any]] | None:
    """What a key outside of any section says, as in files of vLLM and LvLLM: a leaf, also in
    the spelling of its flag, or another server's name. None: it is neither. Raises ConfigError.
    """
    leaf = known.get(key.replace("-", "_"))
    if leaf is not None and not isinstance(value, dict):
        return [(leaf, _flat_scalar(leaf, value))]
    other = None if leaf is not None or key in sections() else other_name(key)
    if other is None:
        return None
    if other.no_effect:
        note(f"{key} has no effect: {other.no_effect}")
        return []
    if other.fixed is not None:
        leaf = known[other.leaf]
        return [(leaf, leaf.parse(other.fixed))] if value else []
    text = other.value(key, str(value))
    return [(known[other.leaf], known[other.leaf].parse(text))]


def _flat_scalar(leaf: Leaf, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return value if value is None or isinstance(value, bool) else leaf.parse(str(value))


def read_yaml(path: Path) -> dict[Any, Any]:
    """A file that holds a mapping, no key twice. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8") as stream:
            document = yaml.load(stream, Loader=_StrictLoader)
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a mapping, as of sections ({', '.join(sections())})")
    return document


def _renamed(name: Any) -> str:
    """Names the leaf that took the place of `name`; empty where none did."""
    new = RENAMED_LEAVES.get(str(name))
    return f"; it is called {new!r} now" if new else ""


def _closest(name: Any, *candidates: Iterable[str]) -> str:
    """`; did you mean 'x'?`, looking in the candidate groups in turn; or the choices when nothing is near."""
    for group in candidates:
        found = difflib.get_close_matches(str(name), list(group), n=1, cutoff=0.6)
        if found:
            return f"; did you mean {found[0]!r}?"
    return f"; known: {', '.join(candidates[0])}"


def _explain(error: ValidationError, known: Mapping[str, Leaf], origin: Mapping[str, str]) -> str:
    """The first validation error as one line that names key, value and what is allowed."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][1])
    leaf = known[name]
    # A validator of ours says it more exactly than the type does.
    allowed = str(first["ctx"]["error"]) if first["type"] == "value_error" else f"allowed: {leaf.allowed}"
    return f"{origin.get(name, name)}: {first['input']!r} is not allowed; {allowed}"


def effective_config(config: MoebiusConfig) -> str:
    """Every setting as YAML that `load_config` reads back to an equal configuration."""
    return _dump(config.model_dump(mode="json"))


def printable_config(config: MoebiusConfig) -> str:
    """`effective_config` with secrets masked, for logs and terminals."""
    tree = config.model_dump(mode="json")
    for values in tree.values():
        for name in SECRET_LEAVES & values.keys():
            values[name] = "********" if values[name] else ""
    return _dump(tree)


def _dump(tree: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(tree, sort_keys=False, default_flow_style=False, width=100, allow_unicode=True)
    return text
