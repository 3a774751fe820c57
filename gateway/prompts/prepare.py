"""Converts the bytes of a request to engine requests: parses, validates, renders, tokenises."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gateway.apis.batch_lines import read_lines, read_messages
from gateway.apis.registry import POOLED, TRANSLATIONS, Kind
from gateway.apis.stored_responses import ResponseStore
from gateway.apis.translation import Context, Translation
from gateway.constraints.response_format import GrammarTakesLong, response_format_constraint
from gateway.generation.data_images import with_data
from gateway.generation.job import Prepared
from gateway.generation.model import ServedModel
from gateway.prompts.jobs import JobPlan, build_jobs
from gateway.prompts.process import Answer, Broken, Refused
from gateway.prompts.tool_use import constraint_of, conversation_of, output_plan
from gateway.schemas.batches import MessageBatchRequest
from gateway.schemas.common import GenerationFields, JsonError, Tolerance, parse_json
from gateway.schemas.errors import CONTEXT_LENGTH_EXCEEDED, ApiError, bad_request, describe_validation_error
from gateway.schemas.requests import (
    ROLES,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    ImageUrl,
    TokenizeRequest,
)
from gateway.schemas.structured import NO_STRUCTURE
from gateway.text.conversation import (
    ChatTemplateError,
    Conversation,
    MarkedText,
    choose_mark,
    mark_text,
    render_prompt,
)
from gateway.transport.admission import too_large
from moebius.config import ImageConfig
from protos import engine_pb2

T = TypeVar("T", bound=BaseModel)
_LONGEST_MESSAGE = 1000
# Tokens before the text, between it and its suffix, and before the completion: Qwen, DeepSeek, GLM, Granite.
FILL_IN_THE_MIDDLE = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
)
# Kinds whose answer is the number of a conversation's tokens, and what stands before it.
_COUNTED: Mapping[Kind, dict[str, str]] = {
    "count_tokens": {},
    "input_tokens": {"object": "response.input_tokens"},
}
MAX_IGNORED = 64  # names logged for one request


class Preparer:
    """Prepares requests for one model; used by one thread."""

    def __init__(
        self,
        model: ServedModel,
        images: ImageConfig,
        max_body_bytes: int,
        strict_parameters: bool = False,
        responses: ResponseStore | None = None,
    ) -> None:
        """`max_body_bytes` bounds a body without its images, which have their own bounds; `responses`: what
        requests may continue."""
        self._responses = responses
        self._owner = ""  # of what the current request may continue
        self._strict = strict_parameters
        self._tolerance = Tolerance(strict_parameters)  # of the current request
        self._model = model
        self._images = images
        self._max_body_bytes = max_body_bytes
        self._kinds: dict[Kind, Callable[[bytes | bytearray], Prepared | bytes]] = {
            "chat": self._chat,
            "completions": self._completions,
            "invocations": self._invocations,
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "apply_template": self._apply_template,
            "batch_lines": functools.partial(read_lines, model=model),
            "message_batch": lambda data: read_messages(self._parsed(data, MessageBatchRequest)),
            **{kind: functools.partial(self._translated, kind) for kind in TRANSLATIONS},
            **{kind: functools.partial(self._pooled, kind) for kind in POOLED},
        }

    def answer(self, kind: Kind, data: bytes | bytearray, owner: str = "") -> Answer:
        """Returns the request of this kind with body `data`, prepared or refused, which may continue what
        `owner` has stored. Raises MemoryError only, or GrammarTakesLong where a constraint is not checked at
        once (`gateway/constraints`)."""
        self._tolerance = Tolerance(self._strict)
        self._owner = owner
        try:
            answer = self._kinds[kind](data)
            if isinstance(answer, Prepared) and self._tolerance.ignored:
                answer = replace(answer, ignored=tuple(sorted(self._tolerance.ignored)[:MAX_IGNORED]))
            return answer
        except ApiError as error:
            return Refused(error.status, error.message[:_LONGEST_MESSAGE], error.param, error.code)
        except (MemoryError, GrammarTakesLong):
            raise
        except Exception as error:
            return Broken(type(error).__name__, traceback.format_exc())

    def _parsed(self, data: bytes | bytearray, schema: type[T]) -> T:
        """Returns the valid body. Raises ApiError 400 that names the error's place."""
        return self._validated(self._value(data), schema, self._tolerance)

    @staticmethod
    def _value(data: bytes | bytearray) -> Any:
        try:
            return parse_json(data)
        except JsonError as error:
            where = repr(error.param) if error.param else "the body"
            raise bad_request(
                f"{where} is not acceptable: {error.message}", error.param, error.code
            ) from None

    @staticmethod
    def _validated(value: Any, schema: type[T], tolerance: Tolerance) -> T:
        try:
            return schema.model_validate(value, context=tolerance)
        except ValidationError as error:
            found = error.errors(include_url=False)
            located = [{**one, "loc": ("body", *one["loc"])} for one in found]
            raise bad_request(*describe_validation_error(located)) from None

    def _chat(self, data: bytes | bytearray) -> Prepared:
        return self._chat_prepared(self._parsed(data, ChatCompletionRequest), len(data))

    def _pooled(self, kind: Kind, data: bytes | bytearray) -> Prepared | bytes:
        """Prepares the prompts of embeddings."""
        schema, translate = POOLED[kind]
        asked = translate(self._parsed(data, schema), self._model)
        self._model.check_name(asked.fields.get("model"))
        if not asked.inputs:
            return _json({"model": asked.reply.model, "embeddings": []})
        body = self._validated(
            {"prompt": "", "max_tokens": 1, **asked.fields}, CompletionRequest, Tolerance()
        )
        pooling = engine_pb2.POOLING_MEAN if asked.pooling == "mean" else engine_pb2.POOLING_LAST
        plan = JobPlan(asked.param, "max_tokens", 1, None, fits_limit=True, pooling=pooling)
        try:
            prompts = [("", self._prompt(prompt, body)[1]) for prompt in asked.inputs]
        except ApiError as error:
            raise Translation({}, {"prompt": asked.param}).named(error) from None
        jobs = build_jobs(body, self._model, plan, prompts)
        return Prepared(body.model_copy(update={"prompt": []}), jobs, None, [], reply=asked.reply)

    def _translated(self, kind: Kind, data: bytes | bytearray) -> Prepared | bytes:
        """Prepares a request of another API as the chat or completion that it corresponds to."""
        schema, translate = TRANSLATIONS[kind]
        responses = None if self._responses is None else self._responses.of_owner(self._owner)
        context = Context(self._tolerance, self._model, responses)
        translation = translate(self._parsed(data, schema), context)
        if translation.answer is not None:
            return _json(translation.answer)
        try:
            if translation.is_text:
                text = self._validated(translation.request, CompletionRequest, Tolerance())
                return replace(self._text_prepared(text, translation.fits_limit), reply=translation.reply)
            try:
                return self._translated_chat(kind, translation, len(data))
            except ApiError as error:
                # Many templates accept instructions at the beginning only; agents add some later.
                softened = translation.softened() if error.param == "messages" else None
                if softened is None:
                    raise
                return self._translated_chat(kind, softened, len(data))
        except ApiError as error:
            raise translation.named(error) from None

    def _translated_chat(self, kind: Kind, translation: Translation, size: int) -> Prepared | bytes:
        body = self._validated(translation.request, ChatCompletionRequest, Tolerance())
        if (counted := _COUNTED.get(kind)) is not None:
            return _json({**counted, "input_tokens": len(self._chat_prompt(body, size)[0])})
        prepared = self._chat_prepared(body, size, translation.fits_limit, translation.texts)
        return replace(prepared, reply=translation.reply)

    def _chat_prompt(
        self, body: ChatCompletionRequest, size: int
    ) -> tuple[list[int], list[tuple[str, ImageUrl]], str]:
        """Returns token ids, images and rendered text of a conversation whose body has `size` bytes."""
        self._model.check_name(body.model)
        images = image_places(body.messages, self._model, self._images)
        self._check_text_size(size - sum(len(image.url) for _, image in images))
        text = self._rendered(conversation_of(body, self._model), body.parse_special)
        check_shown(body.messages, text)
        prompt_ids = self._encoded(text, body.add_special_tokens, "messages", body)
        if images:
            check_placeholders(self._model, prompt_ids, len(images))
            if body.truncate_prompt_tokens is not None:
                raise bad_request("a prompt with images is not cut off", "truncate_prompt_tokens")
        return prompt_ids, images, text.text

    def _chat_prepared(
        self,
        body: ChatCompletionRequest,
        size: int,
        fits_limit: bool = False,
        texts: Mapping[str, tuple[str, str]] | None = None,
    ) -> Prepared:
        prompt_ids, images, text = self._chat_prompt(body, size)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        limit_param, limit = body.token_limit()
        output = output_plan(body, self._model, text, texts)
        plan = JobPlan(
            "messages",
            limit_param,
            limit,
            _asked_logprobs(body, logprobs),
            body.prompt_logprobs,
            echo=body.echoed() is not None,
            fits_limit=fits_limit,
            output=output,
            constraint=constraint_of(body, self._model, output, text),
            with_images=bool(images),
        )
        jobs = build_jobs(body, self._model, plan, [(body.echoed() or "", prompt_ids)])
        left_out: dict[str, Any] = {
            "messages": [],
            "chat_template_kwargs": None,
            "documents": None,
            "bad_words": None,
            "tools": None,
            "functions": None,
        }
        fields = body.model_copy(update=left_out | NO_STRUCTURE)
        files = with_data(images, self._images) if images else []
        prepared = Prepared(fields, jobs, _shown_logprobs(body, logprobs), files)
        return replace(prepared, speaks_functions=body.speaks_functions())

    def _completions(self, data: bytes | bytearray) -> Prepared:
        return self._text_prepared(self._parsed(data, CompletionRequest))

    def _invocations(self, data: bytes | bytearray) -> Prepared:
        """Prepares a chat or a completion, depending on the body's fields."""
        value = self._value(data)
        if isinstance(value, dict) and "messages" in value:
            chat = self._validated(value, ChatCompletionRequest, self._tolerance)
            return self._chat_prepared(chat, len(data))
        if isinstance(value, dict) and "prompt" in value:
            return self._text_prepared(self._validated(value, CompletionRequest, self._tolerance))
        raise bad_request("the body needs 'messages' (a chat) or 'prompt' (a completion)")

    def _text_prepared(self, body: CompletionRequest, fits_limit: bool = False) -> Prepared:
        self._model.check_name(body.model)
        limit_param, limit = body.token_limit()
        echoed = body.logprobs if body.echo else None
        wanted = [count for count in (echoed, body.prompt_logprobs) if count is not None]
        plan = JobPlan(
            "prompt",
            limit_param,
            limit,
            _asked_logprobs(body, body.logprobs),
            max(wanted, default=None),
            bool(body.echo),
            echoes_logprobs=echoed is not None,
            fits_limit=fits_limit,
            best_of=body.best_of,
            constraint=response_format_constraint(body),
        )
        prompts = [self._prompt(prompt, body) for prompt in body.prompt]
        jobs = build_jobs(body, self._model, plan, prompts)
        fields = body.model_copy(update={"prompt": [], "suffix": None, "bad_words": None, **NO_STRUCTURE})
        return Prepared(fields, jobs, _shown_logprobs(body, body.logprobs), [])

    def _prompt(self, prompt: str | list[int], body: CompletionRequest) -> tuple[str, list[int]]:
        """Returns text and ids of one prompt, from either form; the text is only needed to echo it."""
        if isinstance(prompt, str):
            if body.suffix:
                text = self._around_middle(prompt, body.suffix, body.parse_special)
            else:
                text = self._plain_text(prompt, body.parse_special, "prompt")
            return prompt, self._encoded(text, body.add_special_tokens, "prompt", body)
        if body.suffix:
            raise bad_request("'suffix' needs a prompt that is text", "suffix")
        prompt = self._cut_off(prompt, body)
        self._model.check_length(len(prompt), "prompt")
        self._model.check_token_ids(prompt, "prompt")
        echoed = self._model.tokenizer.decode(prompt, skip_special_tokens=False) if body.echo else ""
        return echoed, prompt

    def _tokenize(self, data: bytes | bytearray) -> bytes:
        body = self._parsed(data, TokenizeRequest)
        self._model.check_name(body.model)
        special = body.add_special_tokens
        if body.messages is not None:
            if any(message.image_urls() for message in body.messages):
                raise bad_request(
                    "images are not tokenised here: how many tokens they take depends on them", "messages"
                )
            sent = {name: getattr(body, name) for name in body.CONVERSATION}
            sent["messages"] = parse_json(data)["messages"]
            asked = {name: value for name, value in sent.items() if value is not None}
            chat = self._validated(asked, ChatCompletionRequest, Tolerance())
            tokens, _, _ = self._chat_prompt(chat, len(data))
        else:
            given = body.prompt or body.content or body.text or ""
            text = self._plain_text(given, body.parse_special is not False, "prompt")
            by_default = body.prompt is not None
            tokens = self._encoded(text, by_default if special is None else special, "prompt")
        pieces = [self._model.tokenizer.piece(token) for token in tokens] if body.return_token_strs else None
        return _json(
            {
                "count": len(tokens),
                "max_model_len": self._model.max_context_length,
                "tokens": [self._piece(token) for token in tokens] if body.with_pieces else tokens,
                "token_strs": pieces,
                **({"token_strings": self._texts(tokens)} if body.text is not None else {}),
            }
        )

    def _texts(self, tokens: list[int]) -> list[str]:
        """Returns each token's text, as Cohere does."""
        return [self._model.tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]

    def _apply_template(self, data: bytes | bytearray) -> bytes:
        """Returns the text of a conversation in the chat template, as llama-server does."""
        body = self._parsed(data, ChatCompletionRequest)
        self._model.check_name(body.model)
        text = self._rendered(conversation_of(body, self._model), body.parse_special)
        check_shown(body.messages, text)
        return _json({"prompt": text.plain})

    def _piece(self, token: int) -> dict[str, Any]:
        """Returns a token as llama-server has it: its text, or its bytes where they are no text."""
        data = self._model.tokenizer.token_bytes(token)
        try:
            return {"id": token, "piece": data.decode()}
        except UnicodeDecodeError:
            return {"id": token, "piece": list(data)}

    def _detokenize(self, data: bytes | bytearray) -> bytes:
        body = self._parsed(data, DetokenizeRequest)
        self._model.check_name(body.model)
        self._model.check_token_ids(body.tokens, "tokens")
        text = self._model.tokenizer.decode(body.tokens, skip_special_tokens=False)
        names = ("prompt", "content", "text")  # vLLM's, llama-server's and SGLang's
        return _json(dict.fromkeys(names, text))

    def _rendered(self, conversation: Conversation, parse_special: bool) -> MarkedText:
        """Returns the prompt of a conversation. Raises ApiError 400 if there is no template or it refuses."""
        tokenizer = self._model.tokenizer
        if tokenizer.chat_template is None:
            raise ApiError(
                400,
                f"model {self._model.name!r} has no chat template: use /v1/completions, or start the gateway "
                "with one (--chat-template FILE)",
                param="messages",
                code="no_chat_template",
            )
        try:
            return render_prompt(tokenizer.chat_template, tokenizer.controls, conversation, parse_special)
        except ChatTemplateError as error:
            raise bad_request(str(error), "messages") from error

    def _plain_text(self, text: str, parse_special: bool, param: str) -> MarkedText:
        try:
            return MarkedText(text) if parse_special else mark_text(self._model.tokenizer.controls, text)
        except ChatTemplateError as error:
            raise bad_request(str(error), param) from error

    def _around_middle(self, prefix: str, suffix: str, parse_special: bool) -> MarkedText:
        """Returns a text to continue between `prefix` and `suffix`. Raises ApiError 400 naming `suffix`."""
        tokenizer = self._model.tokenizer
        added = tokenizer.added_tokens
        found = next((names for names in FILL_IN_THE_MIDDLE if all(name in added for name in names)), None)
        if found is None:
            raise bad_request(
                f"the model {self._model.name!r} has no tokens to fill in the middle, which 'suffix' needs",
                "suffix",
                "unsupported_parameter",
            )
        begin, hole, end = found
        mark = "" if parse_special else choose_mark([prefix, suffix])
        if mark is None:
            raise bad_request("the text contains every private-use character of Unicode", "prompt")
        write = tokenizer.controls.marker(mark) if mark else str
        return MarkedText(f"{begin}{write(prefix)}{hole}{write(suffix)}{end}", mark)

    def _cut_off(self, prompt_ids: list[int], body: GenerationFields) -> list[int]:
        """Returns at most `truncate_prompt_tokens` of the ids."""
        most = body.truncate_prompt_tokens
        if most is None:
            return prompt_ids
        if most == -1:
            most = self._model.max_prompt_length
        first = 0 if body.truncation_side == "right" else max(0, len(prompt_ids) - most)
        return prompt_ids[first : first + most]

    def _encoded(
        self,
        text: MarkedText,
        add_special_tokens: bool,
        param: str,
        body: GenerationFields | None = None,
    ) -> list[int]:
        """Returns token ids, truncated if `body` asks for it. Raises ApiError 400 without tokenising if the
        text is too long for any prompt and is not to be truncated."""
        tokenizer, most = self._model.tokenizer, self._model.max_prompt_length
        if body is not None and body.truncate_prompt_tokens is not None:
            return self._cut_off(tokenizer.encode(text, add_special_tokens), body)
        least = tokenizer.text_size.least_tokens(text.plain)
        if least > most:
            raise ApiError(
                400,
                f"This model's maximum context length is {self._model.max_context_length} tokens, of which a "
                f"prompt may take {most}; your '{param}' has {len(text.text)} characters, which are at least "
                f"{least} tokens.",
                param=param,
                code=CONTEXT_LENGTH_EXCEEDED,
            )
        return tokenizer.encode(text, add_special_tokens)

    def _check_text_size(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise too_large(self._max_body_bytes, "without its images, the body")


def _asked_logprobs(body: GenerationFields, logprobs: int | None) -> int | None:
    """Returns the engine's number of log-probabilities; tokens that are named replace the likeliest."""
    return logprobs if logprobs is None or not body.logprob_token_ids else 0


def _shown_logprobs(body: GenerationFields, logprobs: int | None) -> int | None:
    return logprobs if logprobs is None else len(body.logprob_token_ids or ()) or logprobs


def image_places(
    messages: Sequence[ChatMessage], model: ServedModel, config: ImageConfig
) -> list[tuple[str, ImageUrl]]:
    """Returns each image of a conversation with the name of its parameter.

    Raises:
        ApiError: 400; the model is text-only, or there are too many.
    """
    places = [
        (f"messages[{number}].content[{index}].image_url.url", image)
        for number, message in enumerate(messages)
        for index, image in message.image_urls()
    ]
    if places and not model.supports_vision:
        message = f"the model {model.name!r} takes text only, not images"
        raise bad_request(message, places[0][0], "unsupported_image")
    if len(places) > config.max_images_per_request:
        raise bad_request(
            f"{len(places)} images were sent; at most {config.max_images_per_request} are allowed",
            places[config.max_images_per_request][0],
            "too_many_images",
        )
    return places


def check_shown(messages: Sequence[ChatMessage], text: MarkedText) -> None:
    """Raises ApiError 400 if the chat template left out a message of a role that OpenAI does not have."""
    rendered = text.plain
    for number, message in enumerate(messages):
        if message.role not in ROLES and not all(part.strip() in rendered for part in message.texts()):
            raise bad_request(
                f"the chat template does not show messages of role {message.role!r}",
                f"messages[{number}].role",
            )


def check_placeholders(model: ServedModel, prompt_ids: Sequence[int], images: int) -> None:
    """Raises ApiError 400 unless the chat template wrote one placeholder per image."""
    found = sum(token == model.image_token_id for token in prompt_ids)
    if found != images:
        raise bad_request(
            f"the prompt has {found} image placeholders for {images} images: the chat template does not show "
            "all images, or a text contains the placeholder",
            "messages",
            "invalid_image",
        )


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
