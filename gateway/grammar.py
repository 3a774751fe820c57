"""What an output has to look like, as the engine's `Constraint`: from `response_format` and its relatives,
and from tools that have to be called.

A constraint is compiled here, in a prompt process, so that what can not be enforced is a 400 that names the
parameter and the keyword; the engine compiles it again for its masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gateway.errors import ApiError
from gateway.parsers.events import ToolSpec
from gateway.schemas.common import GenerationFields
from protos.engine_pb2 import Constraint


@dataclass(frozen=True)
class ToolFraming:
    """How a model writes tool calls; each tool parser gives its own.

    `{name}` stands for the tool's name, in a parameter's text for the parameter's; `{index}` for the call's
    number; `{string}` for true where the parameter is written raw, else false. Tokens of the tokenizer that
    appear in these texts are forced as tokens.
    """

    call_begin: str  # from the call's beginning to its arguments, the name included
    call_end: str  # after the arguments
    begin: str = ""  # before the first call
    separator: str = ""  # between two calls
    end: str = ""  # after the last call
    # One JSON object, or each argument with a text of its own before and after it.
    arguments: Literal["json", "parameters"] = "json"
    parameter_begin: str = ""
    parameter_end: str = ""
    parameter_separator: str = ""
    # How values of parameters are written: strings without quotes, all else as JSON; all as JSON; or as
    # Python's literals.
    values: Literal["raw", "json", "python"] = "raw"


def response_format_constraint(body: GenerationFields) -> Constraint | None:
    """What `response_format`, `structured_outputs` and the older fields ask for; None: nothing.

    Raises:
        ApiError: 400 naming parameter and keyword; it can not be enforced, or two fields ask for something.
    """
    return None


def tool_call_constraint(
    framing: ToolFraming,
    tools: Sequence[ToolSpec],
    *,
    at_least_one: bool,
    parallel: bool,
    added_tokens: Mapping[str, int],
) -> Constraint:
    """Calls of `tools`, as the model writes them, whose arguments satisfy their schemas.

    Args:
        framing: of the model's tool parser.
        tools: those that may be called; of a named choice just that one.
        at_least_one: the output consists of calls; else text may come before the calls, or instead.
        parallel: whether more than one call may be made.
        added_tokens: ids of the tokenizer's added tokens by their text (`Tokenizer.added_tokens`).

    The caller sets `after_token_ids` and what belongs to it where the model thinks first.

    Raises:
        ApiError: 400 naming the tool and the keyword of its schema that can not be enforced.
    """
    raise ApiError(400, "forced tool calls are not supported yet", param="tool_choice")
