"""What a name of another server means here, and how one is written in the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moebius.errors import ConfigError

# Values that ask for nothing, wherever a name has no other meaning for them.
IDLE = frozenset({"", "0", "0.0", "false", "no", "off", "none", "null", "auto", "default", "{}", "[]"})
# What a number counts, where our setting counts something else: tokens of a KV cache, not pages; threads of
# all expert servers, not of each; draft tokens and the token before them; or what it describes: tensors by
# patterns of their names, not experts. An address has a host and a port.
# A checkpoint that is MODEL's own asks for nothing; a list may be one in JSON. A negative time after which a
# model is unloaded is never, as 0 is here.
Unit = Literal[
    "",
    "tokens",
    "threads",
    "mib",
    "draft_tokens_and_one",
    "tensors",
    "address",
    "checkpoint",
    "list",
    "time",
]


@dataclass(frozen=True)
class OtherName:
    """What another server's name means here; filled by the tables: a setting of ours, or one of the notes."""

    leaf: str = ""  # Our setting.
    # Theirs to ours; others stay as they are. `!reason` refuses one, `@leaf=value` is of another setting,
    # and `@=` of none.
    values: Mapping[str, str] = field(default_factory=dict)
    fixed: str | None = None  # What the name alone stands for, of an option that takes no value.
    fulfilled: str = ""  # Why nothing has to be set: what it asks for is so here.
    # What does it here instead, or that nothing does; of a setting's name: where no other has the value.
    refusal: str = ""
    idle: frozenset[str] = IDLE  # Values of a refused name, in lower case, that ask for nothing.
    takes_value: bool = True
    many: bool = False  # Whether it takes all words up to the next option.
    remarks: Mapping[str, str] = field(default_factory=dict)  # What a value means here, if not clear.
    unit: Unit = ""
    yields: bool = False  # Whether another name's value for the same setting goes before this one's.

    def setting(self, text: str) -> tuple[str, str]:
        """Returns the setting that the value stands for, and ours; an empty setting: nothing has to be set.

        Raises ConfigError with the reason when the value is refused.
        """
        value = self.values.get(text, self.values.get(text.upper(), text))
        if value.startswith("!"):
            raise ConfigError(value[1:])
        if value.startswith("@"):
            leaf, _, value = value[1:].partition("=")
            return leaf, value
        return self.leaf, value


def same(leaf: str, **values: str) -> OtherName:
    """Returns a name of the setting `leaf` with other `values`."""
    return OtherName(leaf, values)


def flag(leaf: str, value: str) -> OtherName:
    """Returns an option without a value that sets `leaf` to `value`."""
    return OtherName(leaf, fixed=value, takes_value=False)


def fulfilled(why: str, takes_value: bool = False, many: bool = False) -> OtherName:
    """Returns a name that asks for what is so here without a setting."""
    return OtherName(fulfilled=why, takes_value=takes_value, many=many)


def refused(instead: str, takes_value: bool = True, idle: str = "", many: bool = False) -> OtherName:
    """Returns a name that something else does here, or nothing; `idle`: further values that ask for nothing,
    separated by spaces."""
    return OtherName(refusal=instead, takes_value=takes_value, idle=IDLE | set(idle.split()), many=many)


SEVERAL_MODELS = (
    "a configuration file with `models` serves several on one port, --max-loaded-models of them in memory of "
    "GPUs at once (docs/sleep.md)"
)
# How long ollama keeps a model loaded after a request.
KEEP_ALIVE = OtherName(
    "sleep_after_s",
    {"0": "!a model sleeps a time after its last request, not at once: --sleep-after-s"},
    unit="time",
)
