"""The format of a model's tool calls, as its parser reads them and a constraint writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ToolFraming:
    """The format of a model's tool calls; each tool parser has one.

    `{name}` stands for the tool's name, in a parameter's texts for the parameter's; `{index}` for the call's
    number; `{string}` for true where the parameter is written raw, else false. Tokens of the tokenizer that
    appear in these texts are forced as tokens.
    """

    call_begin: str  # from the call's beginning to its arguments, the name included
    call_end: str  # after the arguments
    begin: str = ""  # before the first call
    separator: str = ""  # between two calls
    end: str = ""  # after the last call
    # One JSON object, or each argument with text of its own before and after it.
    arguments: Literal["json", "parameters"] = "json"
    parameter_begin: str = ""
    parameter_end: str = ""
    parameter_separator: str = ""
    # The format of parameter values: strings without quotes, all else as JSON; all as JSON; or Python
    # literals.
    values: Literal["raw", "json", "python"] = "raw"
    quote: str = ""  # around raw strings
    # How calls are distinguished from text if the model decides. `marked`: calls begin with `begin`, or with
    # `call_begin`, anywhere. `bare`: the whole output is calls if it begins as they do; after
    # a `marker` they may also come later. `channels`: harmony's messages.
    place: Literal["marked", "bare", "channels"] = "marked"
    marker: str = ""
