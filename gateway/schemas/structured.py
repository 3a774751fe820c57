"""Fields that constrain the output: OpenAI's, vLLM's and SGLang's."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gateway.schemas.common import StrictModel
from moebius.config.request_limits import MAX_CHOICES

JsonSchema = dict[str, Any] | bool


class JsonSchemaFormat(StrictModel):
    """A schema that the output's JSON must satisfy."""

    place = "response_format.json_schema."
    name: str | None = None
    description: str | None = None
    schema_: JsonSchema | None = Field(None, alias="schema", description="Unset: any JSON object")
    strict: bool | None = Field(
        None, description="False: keywords that cannot be enforced are left out instead of refused"
    )


class ResponseFormat(StrictModel):
    """The output's format; `text` is no constraint."""

    place = "response_format."
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: JsonSchema | None = Field(
        None, alias="schema", description="With `json_object`, as other servers accept it"
    )
    structures: list[dict[str, Any]] | None = Field(None, description="Tags: `begin`, `schema`, `end`")
    triggers: list[str] | None = Field(None, description="Prefixes of the tags' beginnings")
    format: dict[str, Any] | None = Field(None, description="Tags as a tree of formats")


class StructuredOutputs(StrictModel):
    """Exactly one kind of constraint, and the form of its JSON."""

    place = "structured_outputs."
    json_: str | JsonSchema | None = Field(None, alias="json", description="A schema, or its JSON")
    regex: str | None = None
    choice: list[str] | None = Field(None, max_length=MAX_CHOICES)
    grammar: str | None = Field(None, description="In GBNF or Lark")
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = Field(None, description="As in `response_format`")
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = Field(
        False, description="Objects have the schema's properties only, where it does not say otherwise"
    )
    whitespace_pattern: str | None = Field(
        None, description="Between the tokens of JSON; a regular expression"
    )
    disable_fallback: bool | None = Field(None, description="No effect: there is one library")


class StructuredFields(StrictModel):
    """The fields with constraints, at most one of which may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, max_length=MAX_CHOICES)
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = Field(None, description="No effect: there is one library")
    json_schema: str | None = Field(None, description="A schema's JSON, as SGLang has it")
    regex: str | None = None
    ebnf: str | None = None


# Their neutral values, once they have become a constraint of the engine's request.
NO_STRUCTURE: dict[str, None] = dict.fromkeys(StructuredFields.model_fields)
