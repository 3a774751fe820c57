"""Reads the configuration tree from a YAML file and flags; its leaves are in `leaves.py`."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import yaml
from pydantic import ValidationError

from moebius.config import MoebiusConfig
from moebius.config.leaves import FALSE_WORDS as FALSE_WORDS
from moebius.config.leaves import TRUE_WORDS as TRUE_WORDS
from moebius.config.leaves import Leaf as Leaf
from moebius.config.leaves import explain
from moebius.config.leaves import leaves as leaves
from moebius.config.leaves import sections as sections
from moebius.errors import ConfigError, all_problems
from moebius.other_servers.setting_names import note
from moebius.other_servers.translation import Translator, servers_of_host

# Leaves that had another name, by the old one.
RENAMED_LEAVES = {"exact_experts": "batch_invariant_experts", "top_k": "experts_per_token"}
# Key of a file's several models.
MODELS = "models"
# Leaves whose value is never printed.
SECRET_LEAVES = frozenset({"api_key"})


if TYPE_CHECKING:
    from yaml import SafeDumper as _Dumper
    from yaml import SafeLoader as _Loader
else:
    # libyaml's where the package was built with it: a tenth of the time, for each process of a system.
    _Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    _Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _StrictLoader(_Loader):
    """YAML's safe loader, which also lists the keys that are given twice, of which the last one wins."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.repeated: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                self.repeated.append(f"{key_node.start_mark.name}: key {key!r} is given twice (line {line})")
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_config(
    yaml_path: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    one_model: tuple[str, Mapping[Any, Any]] | None = None,
) -> MoebiusConfig:
    """Returns the configuration of this process.

    `flags` maps leaf names to values: texts as typed on a command line, or values of the leaf's own
    type; None means that the flag was not given. `one_model`: name and settings of one of the file's
    `models`, which take the place of the file's own. Raises ConfigError naming everything that is wrong.
    """
    known = {leaf.name: leaf for leaf in leaves()}
    tree: dict[str, dict[str, Any]] = {name: {} for name in sections()}
    origin: dict[str, str] = {}
    problems = list[str]()
    if yaml_path:
        for where, document in _documents(Path(yaml_path), one_model, problems):
            for leaf, value in _yaml_values(where, document, known, problems):
                tree[leaf.section][leaf.name] = value
                origin[leaf.name] = f"{leaf.section}.{leaf.name} in {where}"
    for name, value in (flags or {}).items():
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}{_renamed(name) or _closest(name, known)}")
        if value is not None:
            leaf = known[name]
            origin[name] = leaf.flag
            try:
                tree[leaf.section][name] = leaf.parse(value) if isinstance(value, str) else value
            except ConfigError as error:
                problems.append(str(error))
    try:
        config = MoebiusConfig.model_validate(tree, strict=True)
    except ValidationError as error:
        raise all_problems(problems + explain(error, origin)) from None
    if problems:
        raise all_problems(problems)
    return config


def models_of(yaml_path: str | Path) -> dict[str, Mapping[Any, Any]]:
    """Returns the settings of each of a file's `models`, by name; empty: it is of one model.

    Raises ConfigError for models that are none.
    """
    path = Path(yaml_path)
    document, _ = _read(path)
    if MODELS not in document:
        return {}
    models = document[MODELS]
    if not isinstance(models, dict) or not models:
        raise ConfigError(f"{path}: {MODELS!r} must map names to settings, not {models!r}")
    for name, settings in models.items():
        if not isinstance(name, str) or not name or not isinstance(settings, dict) or not settings:
            raise ConfigError(
                f"{path}: {MODELS}.{name} must be a text with a mapping of settings, as `{{model: DIR}}`"
            )
    return models


def _documents(
    path: Path, one_model: tuple[str, Mapping[Any, Any]] | None, problems: list[str]
) -> list[tuple[str, Mapping[Any, Any]]]:
    """Returns the mappings that hold the settings, and how to call them; later ones win.

    Raises ConfigError for a file that is none.
    """
    document, repeated = _read(path)
    problems += repeated
    found: list[tuple[str, Mapping[Any, Any]]] = [(str(path), document)]
    if one_model is not None:
        document.pop(MODELS)
        found.append((f"{path}, {MODELS}.{one_model[0]}", one_model[1]))
    elif MODELS in document:
        document.pop(MODELS)
        problems.append(f"{path}: {MODELS!r} is for `moebius serve` only")
    return found


def _yaml_values(
    path: str, document: Mapping[Any, Any], known: Mapping[str, Leaf], problems: list[str]
) -> Iterator[tuple[Leaf, Any]]:
    """Yields (leaf, value) pairs of a configuration file at `path`, or of a part of it; lists become tuples.
    What is wrong is added to `problems`."""
    flat: dict[str, Any] = {}
    for section, values in document.items():
        if section in sections() and (values is None or isinstance(values, dict)):
            yield from _section_values(path, section, values or {}, known, problems)
        elif (leaf := known.get(str(section).replace("-", "_"))) is not None and not isinstance(values, dict):
            with _collected(problems):
                yield leaf, _flat_scalar(leaf, values)
        else:
            flat[str(section)] = values
    yield from _other_values(path, flat, document, known, problems)


def _section_values(
    path: str, section: str, values: Mapping[str, Any], known: Mapping[str, Leaf], problems: list[str]
) -> Iterator[tuple[Leaf, Any]]:
    for name, value in values.items():
        leaf = known.get(name)
        if leaf is None:
            names = [leaf.name for leaf in known.values() if leaf.section == section]
            hint = _renamed(name) or _closest(name, names, known)
            problems.append(f"{path}: unknown key '{section}.{name}'{hint}")
        elif leaf.section != section:
            problems.append(f"{path}: '{name}' belongs to section {leaf.section!r}, not {section!r}")
        else:
            yield leaf, tuple(value) if isinstance(value, list) else value


def _other_values(
    path: str,
    flat: Mapping[str, Any],
    document: Mapping[Any, Any],
    known: Mapping[str, Leaf],
    problems: list[str],
) -> Iterator[tuple[Leaf, Any]]:
    """Yields what keys outside of any section say in the words of another server, as in files of vLLM and
    LvLLM; `document`: the whole file, in which keys of ours may stand beside them."""
    own = {str(key).replace("-", "_"): str(value) for key, value in document.items() if key not in flat}
    translator = Translator(
        {}, servers_of_host, own={name: value for name, value in own.items() if name in known}
    )
    for key, value in flat.items():
        try:
            if value is not None:
                translator.key(key, value)
        except KeyError:
            is_section = key in sections()
            problems.append(
                f"{path}: section {key!r} must be a mapping of settings, not {value!r}"
                if is_section
                else f"{path}: unknown section {key!r}{_closest(key, sections(), known)}"
            )
    translation = translator.finish()
    for text in translation.notes:
        note(text)
    problems += [f"{path}: {difference}" for difference in translation.differences]
    for name, (_, text) in translation.settings.items():
        yield known[name], known[name].parse(text)


@contextlib.contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems.append(str(error))


def _flat_scalar(leaf: Leaf, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return value if value is None or isinstance(value, bool) else leaf.parse(str(value))


def _read(path: Path) -> tuple[dict[Any, Any], list[str]]:
    """Returns a file's mapping, and a line for each key that stands in it twice. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8") as stream:
            loader = _StrictLoader(stream)
            try:
                document = loader.get_single_data()
            finally:
                loader.dispose()
    except OSError as error:
        raise ConfigError(f"cannot read configuration file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if document is None:
        return {}, loader.repeated
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a mapping, as of sections ({', '.join(sections())})")
    return document, loader.repeated


def read_yaml(path: Path) -> dict[Any, Any]:
    """Returns the mapping that a file holds, no key twice. Raises ConfigError."""
    document, repeated = _read(path)
    if repeated:
        raise all_problems(repeated)
    return document


def _renamed(name: Any) -> str:
    """Names the leaf that took the place of `name`; empty where none did."""
    new = RENAMED_LEAVES.get(str(name))
    return f"; it is called {new!r} now" if new else ""


def _closest(name: Any, *candidates: Iterable[str]) -> str:
    """Computes `; did you mean 'x'?`, looking in the candidate groups in turn; or the choices when nothing is
    near.
    """
    for group in candidates:
        found = difflib.get_close_matches(str(name), list(group), n=1, cutoff=0.6)
        if found:
            return f"; did you mean {found[0]!r}?"
    return f"; known: {', '.join(candidates[0])}"


def effective_config(config: MoebiusConfig) -> str:
    """Returns every setting as YAML that `load_config` reads back to an equal configuration."""
    return _dump(config.model_dump(mode="json"))


def printable_config(config: MoebiusConfig) -> str:
    """Returns `effective_config` with secrets masked, for logs and terminals."""
    tree = config.model_dump(mode="json")
    for values in tree.values():
        for name in SECRET_LEAVES & values.keys():
            values[name] = "********" if values[name] else ""
    return _dump(tree)


def _dump(tree: dict[str, Any]) -> str:
    text: str = yaml.dump(
        tree, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=100, allow_unicode=True
    )
    return text
