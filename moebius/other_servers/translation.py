"""Options, keys and variables of other servers in our settings: what each stands for, and what differs.

All that differs is collected, so that a person reads it at once (`setting_names.py` has the names).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from moebius.config import MoebiusConfig
from moebius.config.leaves import FALSE_WORDS, Leaf, explain, leaves
from moebius.durations import seconds_of
from moebius.errors import ConfigError
from moebius.other_servers.setting_names import OtherName, field_name, other_name, other_variable
from moebius.other_servers.tensor_overrides import resident_layers
from moebius.other_servers.vllm_sglang import OTHER_DRAFTS

_NUMBER = re.compile(r"-\d")
_DEFAULT_PAGE = 16
# What others call the argument MODEL.
MODEL_OPTIONS = frozenset({"model", "model-path", "m", "hf", "hfr", "hf-repo", "llama-arg-model"})


@dataclass(frozen=True)
class Translation:
    """A command line in our options; filled by `Translator`."""

    arguments: list[str]
    # Settings that other names stood for, as texts: leaf name to (name as written, value).
    settings: Mapping[str, tuple[str, str]]
    notes: list[str]  # What needs no setting here, and why.
    differences: list[str]  # What was left out of `arguments`: name, value, and what does it here.


@dataclass
class _Setting:
    """A setting that a name stands for; filled by `Translator`, which completes the value at the end."""

    name: str
    other: OtherName
    leaf: str
    value: str


@dataclass(frozen=True)
class _Wrong:
    """An option that no server has, or one of ours with a wrong value; filled by `Translator`."""

    words: tuple[str, ...]
    why: str


@dataclass
class Translator:
    """Collects what the words of a command line, keys of a file and variables mean; `finish` has the whole.

    `options`: those of our command, and whether each takes a value. `count_servers` returns how many expert
    servers there will be where nothing says so. `keeps_wrong`: an option that no server has, or a
    wrong value of ours, is no difference unless there are others: the command refuses it.
    """

    options: Mapping[str, bool]
    count_servers: Callable[[], int]
    keeps_wrong: bool = True
    own: dict[str, str] = field(default_factory=dict)  # Values of our own settings, by leaf.
    _parts: list[list[str] | _Setting | _Wrong] = field(default_factory=list)
    _overrides: list[str] = field(default_factory=list)
    _overridden_by: str = ""
    _model: str = ""
    _checkpoints: list[tuple[str, OtherName, str]] = field(default_factory=list)
    _refused_leaves: set[str] = field(default_factory=set)
    _notes: list[str] = field(default_factory=list)
    _differences: list[str] = field(default_factory=list)

    def words(self, arguments: Sequence[str]) -> Translator:
        """Adds a command line, in which options of ours stay as they are."""
        waiting = deque(arguments)
        while waiting:
            argument = waiting.popleft()
            name, has_value, value = argument.partition("=")
            if argument == "--":
                self._parts.append([argument, *waiting])
                break
            if not _is_option(name):
                self._add_word(argument)
                continue
            if (flag := self._own_flag(name)) is not None:
                takes_next = self.options[flag] and not has_value and bool(waiting)
                self._add_own(
                    flag, argument.replace(name, flag, 1), waiting.popleft() if takes_next else value
                )
                continue
            self._take(argument, name, value if has_value else None, waiting)
        return self

    def key(self, name: str, value: Any) -> Translator:
        """Adds a key of a configuration file. Raises KeyError when no server has such a name."""
        is_off = value is False
        other = (other_name(f"no-{name}") if is_off else None) or other_name(name)
        if other is None:
            raise KeyError(name)
        if is_off and other is other_name(name):
            return self  # What it would switch on is not asked for.
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        self._apply(name, other, " ".join(map(str, value)) if isinstance(value, list) else text)
        return self

    def variable(self, name: str, value: str) -> Translator:
        """Adds an environment variable of another server. Raises KeyError when no server has such a one."""
        if name.lower().replace("_", "-").removeprefix("llama-arg-") in MODEL_OPTIONS:
            self._add_word(value)
            return self
        other = other_variable(name)
        if other is None:
            raise KeyError(name)
        if other.takes_value or value.lower() not in FALSE_WORDS:
            self._apply(name, other, value)
        return self

    def differ(self, what: str, why: str) -> None:
        """Adds a difference that no name stands for."""
        self._differences.append(f"{what}: {why}")

    def finish(self) -> Translation:
        """Returns the translation of all that was added."""
        self._place_experts()
        self._compare_checkpoints()
        kept = self._kept()
        if self._differences or not self.keeps_wrong:
            self._differences += [part.why for part in self._parts if isinstance(part, _Wrong)]
        arguments = list[str]()
        for part in self._parts:
            if isinstance(part, _Setting):
                if kept.get(part.leaf) is part:
                    leaf = leaf_of(part.leaf)
                    arguments += leaf.arguments(leaf.parse(part.value))
            elif isinstance(part, list):
                arguments += part
            elif not self._differences:
                arguments += part.words
        settings = {name: (setting.name, setting.value) for name, setting in kept.items()}
        return Translation(arguments, settings, self._notes, self._differences)

    def _own_flag(self, name: str) -> str | None:
        """Returns our option, also where its words are joined by underscores."""
        dashed = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        return next((spelling for spelling in (name, dashed) if spelling in self.options), None)

    def _add_own(self, flag: str, argument: str, value: str) -> None:
        words = [argument] if not self.options[flag] or "=" in argument else [argument, value]
        leaf = _LEAVES().get(flag[2:].replace("-", "_"))
        if leaf is not None and leaf.name != "model":
            self.own[leaf.name] = value
            if self.options[flag] and (wrong := problem(leaf, value, leaf.flag)):
                self._parts.append(_Wrong(tuple(words), wrong))
                return
        self._parts.append(words)

    def _take(self, argument: str, name: str, value: str | None, waiting: deque[str]) -> None:
        """Adds an option that is not ours, with its value or values, which are taken from `waiting`."""
        is_model, other = name.lstrip("-") in MODEL_OPTIONS, other_name(name)
        if other is None and not is_model:
            has_value = value is None and waiting and not _is_option(waiting[0]) and self._model
            words = (argument, waiting.popleft()) if has_value else (argument,)
            self._parts.append(
                _Wrong(words, f"{' '.join(words)}: no server that is known here has this option")
            )
            return
        # Some take a value in newer versions only, and none of theirs begins with a dash.
        if value is None and (is_model or (other is not None and other.takes_value)):
            taken = list[str]()
            while (
                waiting and not _is_option(waiting[0]) and (not taken or (other is not None and other.many))
            ):
                taken.append(waiting.popleft())
            value = " ".join(taken)
        if other is None:
            self._add_word(value or "")
        elif other.takes_value or (value or "").lower() not in FALSE_WORDS:
            self._apply(name, other, value or "")

    def _add_word(self, word: str) -> None:
        """Adds MODEL, which is the only word that belongs to no option."""
        self._model = self._model or word
        self._parts.append([word])

    def _apply(self, name: str, other: OtherName, value: str) -> None:
        if other.takes_value and (fields := _fields(value)) is not None:
            self._apply_fields(name, other, value, fields)
            return
        shown = f"{name} {value}".strip()
        try:
            leaf, text = other.setting(value) if other.fixed is None else (other.leaf, other.fixed)
        except ConfigError as error:
            self._refused_leaves.add(other.leaf)
            self.differ(shown, str(error))
            return
        if value in other.remarks:
            self._notes.append(f"{shown}: {other.remarks[value]}")
        if other.unit == "checkpoint":
            self._checkpoints.append((name, other, text))
        elif other.unit == "tensors":
            self._override(name, text)
        elif leaf:
            self._set(_Setting(name, other, leaf, text))
        elif other.fulfilled:
            self._notes.append(f"{name} has no effect: {other.fulfilled}")
        elif not (other.takes_value and value and value.lower() in other.idle):
            self.differ(shown, other.refusal)

    def _apply_fields(self, name: str, other: OtherName, value: str, fields: Mapping[str, Any]) -> None:
        """Adds an option whose value is an object: each field has a meaning of its own."""
        known = {key: field_name(name, key) for key in fields}
        for key, meaning in known.items():
            if meaning is not None:
                text = fields[key] if isinstance(fields[key], str) else json.dumps(fields[key])
                self._apply(f"{name}.{key}", meaning, text)
        if fields and None in known.values():
            self.differ(f"{name} {value}", other.refusal or "such a field is not known here")

    def _set(self, setting: _Setting) -> None:
        with contextlib.suppress(ValueError):
            if setting.other.unit == "draft_tokens_and_one":
                setting.value = str(int(setting.value) - 1)
        if setting.other.unit == "address":
            host, _, port = setting.value.rpartition("://")[2].rpartition(":")
            if port.isdecimal():
                self._parts.append(_Setting(setting.name, OtherName(), "port", port))
            setting.value = host or port
        if setting.other.unit == "list" and setting.value.startswith("["):
            with contextlib.suppress(ValueError):
                setting.value = ",".join(map(str, json.loads(setting.value)))
        if setting.other.unit == "time":
            with contextlib.suppress(ValueError):
                setting.value = f"{max(0.0, seconds_of(setting.value)):g}"
        self._parts.append(setting)

    def _override(self, name: str, text: str) -> None:
        """Adds patterns of tensors and their devices; of a number, the experts of the first layers."""
        self._overridden_by = self._overridden_by or name
        if text.isdecimal():
            layers = "|".join(map(str, range(int(text))))
            text = rf"blk\.({layers})\.ffn_(up|down|gate|gate_up)_exps=CPU" if int(text) else ""
        self._overrides += [part.strip() for part in text.split(",") if part.strip()]

    def _compare_checkpoints(self) -> None:
        """Leaves out what names MODEL once more."""
        for name, other, path in self._checkpoints:
            if path.rstrip("/") != self._model.rstrip("/"):
                if other.leaf:
                    self._set(_Setting(name, other, other.leaf, path))
                else:
                    self.differ(f"{name} {path}", other.refusal)

    def _place_experts(self) -> None:
        """Says by layers what patterns of tensors say by names."""
        if not self._overrides:
            return
        placed = resident_layers(self._overrides)
        self._notes += placed.notes
        self._differences += placed.differences
        if placed.layers:
            self._set(_Setting(self._overridden_by, OtherName(), "gpu_layers", placed.layers))
        elif placed.is_on_cpus:
            self._set(_Setting(self._overridden_by, OtherName(), "gpu_experts", "0"))
            self._notes.append("without --gpu-experts 0, experts fill what is left of the GPU")

    def _kept(self) -> dict[str, _Setting]:
        """Returns one setting of each leaf, in our units, those that are not allowed left out."""
        found: dict[str, _Setting] = {}
        for part in self._parts:
            if isinstance(part, _Setting):
                self._merge(found, part)
        self._convert(found)
        for name, setting in list(found.items()):
            shown = f"{setting.name} {setting.value}" if setting.other.takes_value else setting.name
            wrong = problem(leaf_of(name), setting.value, leaf_of(name).flag)
            if wrong and setting.other.refusal:
                wrong = f"{shown}: {setting.other.refusal}"
            if wrong or name in self.own:
                del found[name]
                if wrong:
                    self._differences.append(wrong)
                elif self.own[name] != setting.value:
                    self.differ(shown, f"{leaf_of(name).flag} is set, too, and is used")
        return found

    def _merge(self, found: dict[str, _Setting], setting: _Setting) -> None:
        """Keeps the last value of a name, and of two names the one that does not yield."""
        earlier = found.get(setting.leaf)
        if earlier is None or earlier.name == setting.name or earlier.other.yields:
            found[setting.leaf] = setting
        elif not setting.other.yields and earlier.value != setting.value:
            theirs = f"{setting.name} {setting.value}, after {earlier.name} {earlier.value}"
            self.differ(theirs, f"both are {leaf_of(setting.leaf).flag} here")

    def _convert(self, found: dict[str, _Setting]) -> None:
        """Counts in our units what other servers count otherwise."""

        def number(leaf: str, default: int) -> int:
            text = found[leaf].value if leaf in found else self.own.get(leaf, "")
            return int(text) if text.isdecimal() and int(text) else default

        for setting in found.values():
            if not setting.value.isdecimal():
                continue
            if setting.other.unit == "tokens":
                setting.value = str(-(-int(setting.value) // number("page_size", _DEFAULT_PAGE)))
            if setting.other.unit == "threads" and int(setting.value):
                servers = number("expert_servers", 0) or max(1, self.count_servers())
                setting.value = str(max(1, int(setting.value) // servers))
            if setting.other.unit == "mib":
                setting.value = f"{int(setting.value) / 1024:g}"
        if "speculative_method" in self._refused_leaves - found.keys():
            found.pop("num_draft_tokens", None)
        method = found["speculative_method"].value if "speculative_method" in found else ""
        method = method or self.own.get("speculative_method", "")
        second = found.get("speculative_model")
        if second is not None and not method and "speculative_method" not in self._refused_leaves:
            # What the other model is, its files say.
            leaf = "speculative_method"
            found[leaf] = _Setting(second.name, OtherName(leaf), leaf, "auto")
            self._parts.append(found[leaf])
        elif second is not None and not any(name in method for name in ("eagle3", "draft_model", "auto")):
            del found["speculative_model"]
            self.differ(f"{second.name} {second.value}", OTHER_DRAFTS)
        converted = found.get("expert_checkpoint")
        requantised = "expert_dtype" in found and found["expert_dtype"].value in ("int4", "int8")
        if converted is not None and requantised:
            del found["expert_checkpoint"]
            self._notes.append(
                f"{converted.name} has no effect: experts of MODEL are requantised while loading"
            )


def leaf_of(name: str) -> Leaf:
    """Returns the leaf of that name."""
    return _LEAVES()[name]


def problem(leaf: Leaf, text: str, origin: str) -> str:
    """Returns why the leaf cannot have that value, in a line that begins with `origin`; empty: it can."""
    try:
        MoebiusConfig.model_validate({leaf.section: {leaf.name: leaf.parse(text)}}, strict=True)
    except ConfigError as error:
        return str(error)
    except ValidationError as error:
        return "; ".join(explain(error, {leaf.name: origin}))
    return ""


def servers_of_host() -> int:
    """Returns how many expert servers this host has by default: one for each NUMA node."""
    from moebius.host.topology import Topology

    return max(1, len(Topology.detect().server_nodes()))


def _LEAVES() -> dict[str, Leaf]:
    return {leaf.name: leaf for leaf in leaves()}


def _is_option(text: str) -> bool:
    return text.startswith("-") and len(text) > 1 and not _NUMBER.match(text)


def _fields(value: str) -> dict[str, Any] | None:
    """Returns the fields of an object in JSON, or of `name=value,name=value`; None for any other value."""
    if value.startswith("{"):
        with contextlib.suppress(ValueError):
            found = json.loads(value)
            return found if isinstance(found, dict) else None
    pairs = [part.partition("=") for part in value.split(",")]
    if value and all(re.fullmatch(r"(image|video|audio)", name) and text for name, _, text in pairs):
        return {name: text for name, _, text in pairs}
    return None
