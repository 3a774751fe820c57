"""Guards chats with Hunyuan's checkpoints, whose tags end in a suffix that their templates put together."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from gateway.generation.model import ServedModel, load_served_model
from gateway.prompts.tool_use import conversation_of, output_plan
from gateway.schemas.requests import ChatCompletionRequest
from gateway.text.conversation import render_prompt
from gateway.text.tokenizer import Tokenizer
from protos import engine_pb2
from tests.helpers.parser_streams import in_characters, parsed, read
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

SUFFIX = "6124c78e"
# The parts of such a template that matter here: its switch, and an opened or an empty thought at the end.
TEMPLATE = (
    "{%- set HYTK = ':" + SUFFIX + "' %}{%- set think = '<think{}>'.format(HYTK) %}"
    "{%- set end = '</think{}>'.format(HYTK) %}{%- set key = '<arg_key{}>'.format(HYTK) %}"
    "{%- if not reasoning_effort is defined %}{%- set reasoning_effort = 'high' %}"
    "{%- elif reasoning_effort not in ['high', 'low', 'no_think'] %}{{- raise_exception('effort') }}"
    "{%- endif %}"
    "{%- for message in messages %}{{- message.content }}{%- endfor %}"
    "{{- key if tools else '' }}{{- think if reasoning_effort != 'no_think' else think + end }}"
)
CALLS = (
    "So.</think:X>Let me see.<tool_calls:X><tool_call:X>get_weather<arg_key:X>city</arg_key:X>"
    "<arg_value:X>Rome</arg_value:X></tool_call:X></tool_calls:X>"
).replace("X", SUFFIX)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Hy4, as the gateway knows it."""
    directory, backend = tmp_path_factory.mktemp("hy4"), byte_level_tokenizer(300)
    names = ("think", "tool_calls", "tool_call", "arg_key", "arg_value")
    tags = [f"<{slash}{name}:{SUFFIX}>" for name in names for slash in ("", "/")]
    backend.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in tags])
    write_tokenizer(directory, backend, TEMPLATE)
    info = engine_pb2.GetModelInfoResponse(
        served_model_name="m", max_context_length=100_000, vocab_size=1000, model_type="hy_v4"
    )
    return load_served_model(info, Tokenizer.from_dir(directory), "")


def request(**fields: object) -> ChatCompletionRequest:
    """Returns a question, with a tool."""
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    return ChatCompletionRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [tool], **fields}
    )


def prompt_of(model: ServedModel, body: ChatCompletionRequest) -> str:
    """Returns the rendered prompt."""
    template = model.tokenizer.chat_template
    assert template is not None
    return render_prompt(template, model.tokenizer.controls, conversation_of(body, model)).text


def test_thoughts_and_calls_are_read_by_the_checkpoints_own_tags(model: ServedModel) -> None:
    """Thought, content and call are distinguished with the suffix of the template."""
    body = request()
    plan = output_plan(body, model, prompt_of(model, body))
    assert plan is not None
    assert plan.starts_in_reasoning
    result = parsed(read(plan, in_characters(CALLS)))
    assert (result.reasoning, result.content) == ("So.", "Let me see.")
    assert list(result.calls) == [("get_weather", {"city": "Rome"})]


@pytest.mark.parametrize(("effort", "thinks"), [(None, True), ("high", True), ("low", True), ("none", False)])
def test_effort_none_is_called_no_think_there(model: ServedModel, effort: str | None, thinks: bool) -> None:
    """OpenAI's name for no thoughts is the template's `no_think`, which refuses all that it does not know."""
    body = request(reasoning_effort=effort)
    prompt = prompt_of(model, body)
    assert prompt.endswith(f"<think:{SUFFIX}>" if thinks else f"</think:{SUFFIX}>")
    plan = output_plan(body, model, prompt)
    assert plan is not None
    assert plan.starts_in_reasoning == thinks


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_a_switch_that_the_template_does_not_read_is_an_effort(model: ServedModel, switch: str) -> None:
    """Clients use a name that works for most models; an effort of the request's own wins."""
    off = {"chat_template_kwargs": {switch: False}}
    assert prompt_of(model, request(**off)).endswith(f"</think:{SUFFIX}>")
    assert prompt_of(model, request(**off, reasoning_effort="high")).endswith(f"<think:{SUFFIX}>")
    assert prompt_of(model, request(chat_template_kwargs={switch: True})).endswith(f"<think:{SUFFIX}>")
