"""The bodies of embeddings, scores and rankings: OpenAI's, Cohere's, Ollama's, and vLLM's and Jina's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, model_validator

from gateway.schemas.common import INT64_MAX, INT64_MIN, MAX_LABEL_CHARACTERS, StrictModel

Label = Annotated[str, Field(max_length=MAX_LABEL_CHARACTERS)]
MAX_INPUTS = 2048  # texts of one request, as in OpenAI's API
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Inputs = str | Texts | Ids | Annotated[list[Ids], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
PoolingName = Literal["last", "mean"]


class PooledFields(StrictModel):
    """Fields that all of these share."""

    model: Label | None = Field(None, description="Name as in /v1/models; may be left out")
    pooling: PoolingName = Field("last", description="Hidden state of the last token, or the mean of all")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="A longer text loses its beginning; -1: as long as the model takes"
    )
    add_special_tokens: bool = Field(True, description="Begin and end texts as the tokenizer does")
    priority: int = Field(0, ge=INT64_MIN, le=INT64_MAX, description="Lower runs earlier")
    cache_salt: Label | None = None
    user: Label | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Returns the fields that are set: clients send null for those that are not."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class EmbeddingRequest(PooledFields):
    """OpenAI's embeddings."""

    input: Inputs = Field(description="A text, several, token ids, or several lists of them")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(
        None, ge=1, description="Keep only this many first values, and normalise again"
    )
    normalize: bool = Field(True, description="Divide by the Euclidean norm")


class ScoreRequest(PooledFields):
    """vLLM's scores: of one text with others, or of pairs."""

    text_1: str | Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: str | Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))


class RankedDocument(StrictModel):
    """A document that is an object."""

    place = "documents[]."
    text: str


class RerankRequest(PooledFields):
    """Jina's and Cohere's ranking of documents."""

    query: str
    documents: list[str | RankedDocument] = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
    top_n: int | None = Field(None, ge=1, description="Unset: all documents")
    return_documents: bool | None = Field(None, description="Unset: true, but false in Cohere's API")
    max_tokens_per_doc: int | None = Field(None, ge=1, description="Longer documents lose their end")


class OllamaEmbedRequest(StrictModel):
    """Ollama's embeddings."""

    model: Label = Field(description="Name as in /api/tags; :latest may follow it")
    input: str | Texts = Field(default_factory=list, description="Nothing: only whether the model is there")
    truncate: bool | None = Field(None, description="Unset: a text that is too long loses its end")
    dimensions: int | None = Field(None, ge=1)
    options: Any = Field(None, description="No effect")
    keep_alive: Any = Field(None, description="No effect: requests of chats and texts have it")


class OllamaEmbeddingRequest(StrictModel):
    """Ollama's earlier form: one text, its values not normalised."""

    model: Label
    prompt: str
    options: Any = Field(None, description="No effect")
    keep_alive: Any = Field(None, description="No effect: requests of chats and texts have it")


class LlamaEmbeddingRequest(PooledFields):
    """llama-server's own embeddings."""

    input: Inputs = Field(
        validation_alias=AliasChoices("content", "input"), description="As `content`, or as `input`"
    )
    embd_normalize: Literal[-1, 2] = Field(2, description="Divide by the Euclidean norm; -1: do not")


class SglangEncodeRequest(PooledFields):
    """SGLang's own embeddings."""

    text: Inputs = Field(
        validation_alias=AliasChoices("text", "input_ids"), description="As `text`, or as `input_ids`"
    )


class CohereContent(StrictModel):
    """A part of an input."""

    place = "inputs[].content[]."
    type: Literal["text"]
    text: str


class CohereInput(StrictModel):
    """An input of parts, which is their text."""

    place = "inputs[]."
    content: list[CohereContent] = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)


class CohereEmbedRequest(PooledFields):
    """Cohere's embeddings, of both versions of its API; exactly one of `texts` and `inputs`."""

    texts: Texts | None = None
    inputs: list[CohereInput] | None = Field(None, min_length=1, max_length=MAX_INPUTS, fail_fast=True)
    input_type: Label | None = Field(None, description="No effect: texts are taken as they are")
    embedding_types: list[Literal["float", "base64"]] | None = Field(None, description="Unset: float")
    output_dimension: int | None = Field(None, ge=1)
    truncate: Literal["NONE", "START", "END"] = Field("END", description="Which end of a longer text is lost")
