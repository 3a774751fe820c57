"""Guards chats of DeepSeek-V3.2 and V4, which are published with Python code in the place of a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from gateway.generation.model import ServedModel, load_served_model
from gateway.parsers.events import OutputPlan, ToolSpec
from gateway.prompts.tool_use import conversation_of, output_plan
from gateway.schemas.requests import ChatCompletionRequest
from gateway.text.conversation import ChatTemplateError, MarkedText, render_prompt
from gateway.text.tokenizer import Tokenizer
from protos import engine_pb2
from tests.helpers.parser_streams import in_characters, parsed, read
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

PUBLISHED: dict[str, Any] = json.loads(
    (Path(__file__).parents[3] / "data/deepseek_prompts.json").read_text(encoding="utf-8")
)
CASES = [
    pytest.param(case["request"], mode, prompt, id=f"{case['name']}, {mode}")
    for case in PUBLISHED["conversations"]
    for mode, prompt in case["prompts"].items()
]
TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)
TYPES = ("deepseek_v32", "deepseek_v4")
END = "<｜end▁of▁sentence｜>"


def model_files(
    directory: Path, model_type: str, template: str | None = None, tokens: tuple[str, ...] = ()
) -> Path:
    """Returns a checkpoint's tokenizer with the tokens of DeepSeek's, and a config.json that names the
    family.
    """
    backend = byte_level_tokenizer()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in TOKENS + tokens])
    backend.add_tokens([AddedToken("｜DSML｜", normalized=False)])
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return write_tokenizer(directory, backend, template)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedModel]:
    """Returns a served model of each type."""
    return {name: served(model_files(tmp_path_factory.mktemp(name), name), name) for name in TYPES}


def served(directory: Path, model_type: str) -> ServedModel:
    """Returns the model in `directory`, as the gateway knows it."""
    info = engine_pb2.GetModelInfoResponse(
        served_model_name="m", max_context_length=100_000, vocab_size=1000, model_type=model_type
    )
    return load_served_model(info, Tokenizer.from_dir(directory), "")


def prompt_of(model: ServedModel, **fields: Any) -> MarkedText:
    """Returns the prompt of a chat request."""
    body = ChatCompletionRequest.model_validate({"model": "m", **fields})
    template = model.tokenizer.chat_template
    assert template is not None
    return render_prompt(template, model.tokenizer.controls, conversation_of(body, model))


def text_of(model: ServedModel, *messages: tuple[str, str], **fields: Any) -> str:
    """Returns the prompt's text of (role, content) pairs."""
    listed = [{"role": role, "content": content} for role, content in messages]
    return prompt_of(model, messages=listed, **fields).text


@pytest.mark.parametrize(("request_fields", "mode", "expected"), CASES)
def test_prompts_are_those_of_the_published_code(
    models: dict[str, ServedModel], request_fields: dict[str, Any], mode: str, expected: str
) -> None:
    """Letter by letter: roles, tools, calls and their results, schemas, thoughts kept and left out."""
    name, thinking = mode.split()
    switch = {"thinking": thinking == "thinking"}
    assert prompt_of(models[name], **request_fields, chat_template_kwargs=switch).text == expected


@pytest.mark.parametrize("name", TYPES)
def test_the_models_parsers_read_what_its_history_shows(models: dict[str, ServedModel], name: str) -> None:
    """The calls in a rendered answer are the calls that were sent; so are its thought and its content."""
    model = models[name]
    assert (model.tool_parser, model.reasoning_parser) == (name, "deepseek_v31")
    arguments = {
        "text": ' two\n\n lines, "quoted" <b> & 東京 ',
        "number": -1.5,
        "flag": False,
        "nothing": None,
        "list": [1, {"a": "</x>"}],
        "empty": "",
    }
    calls = [("f", arguments), ("g", {}), ("f", {"object": {"a": {"b": "}"}}})]
    sent = [
        {"id": f"c{number}", "type": "function", "function": {"name": tool, "arguments": json.dumps(values)}}
        for number, (tool, values) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": "Let me see.", "reasoning": "Both.", "tool_calls": sent}
    question = {"role": "user", "content": "?"}
    tools = [{"type": "function", "function": {"name": tool, "parameters": {}}} for tool in ("f", "g")]
    fields = {"tools": tools, "chat_template_kwargs": {"thinking": True}}
    before = prompt_of(model, messages=[question], **fields).text
    after = prompt_of(model, messages=[question, answer], **fields).text
    assert after.startswith(before)
    assert after.endswith(END)
    written = after[len(before) : -len(END)]
    body = ChatCompletionRequest.model_validate({"model": "m", "messages": [question], **fields})
    plan = output_plan(body, model, before)
    assert plan is not None
    result = parsed(read(plan, in_characters(written)))
    assert (result.content, result.reasoning) == ("Let me see.", "Both.")
    assert list(result.calls) == calls


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, {"deepseek_v32": False, "deepseek_v4": True}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, dict.fromkeys(TYPES, True)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, dict.fromkeys(TYPES, False)),
        ({"reasoning_effort": "high"}, dict.fromkeys(TYPES, True)),
        ({"reasoning_effort": "none"}, dict.fromkeys(TYPES, False)),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
            dict.fromkeys(TYPES, False),
        ),
    ],
)
@pytest.mark.parametrize("name", TYPES)
def test_requests_switch_thoughts(
    models: dict[str, ServedModel], name: str, fields: dict[str, Any], thinks: dict[str, bool]
) -> None:
    """Requests use either name of the switch, or the effort; `chat_template_kwargs` win; the parser
    knows it.
    """
    text = text_of(models[name], ("user", "Hi"), **fields)
    assert text.endswith("<｜Assistant｜><think>" if thinks[name] else "<｜Assistant｜></think>")
    message = {"role": "user", "content": "Hi"}
    body = ChatCompletionRequest.model_validate({"model": "m", "messages": [message], **fields})
    plan = output_plan(body, models[name], text)
    assert plan is not None
    assert plan.starts_in_reasoning == thinks[name]


@pytest.mark.parametrize("name", TYPES)
def test_instructions_of_a_developer_are_a_systems(models: dict[str, ServedModel], name: str) -> None:
    """A developer's message right before a user's is OpenAI's name for instructions, not a question."""
    question = ("user", "Hi")
    written = text_of(models[name], ("developer", "Be brief."), question)
    assert written == text_of(models[name], ("system", "Be brief."), question)
    both = text_of(models[name], ("system", "Be kind."), ("developer", "Be brief."), question)
    assert both == text_of(models[name], ("system", "Be kind.\n\nBe brief."), question)


@pytest.mark.parametrize("name", TYPES)
def test_an_answer_can_be_continued(models: dict[str, ServedModel], name: str) -> None:
    """The prompt ends with its text; without a generation prompt no turn of the model is opened."""
    messages = (("user", "Count."), ("assistant", "One, "))
    text = text_of(
        models[name],
        *messages,
        continue_final_message=True,
        add_generation_prompt=False,
        chat_template_kwargs={"thinking": True},
    )
    assert text.endswith("<｜User｜>Count.<｜Assistant｜><think></think>One, ")
    assert text_of(models[name], messages[0], add_generation_prompt=False).endswith("<｜User｜>Count.")


@pytest.mark.parametrize("name", TYPES)
def test_typed_tokens_are_text(models: dict[str, ServedModel], name: str) -> None:
    """Only the template writes control tokens: not in questions, instructions, results or arguments."""
    tokenizer = models[name].tokenizer
    listed = (*TOKENS, "｜DSML｜")
    typed = "a" + "".join(listed) + "b"

    def ids(text: str) -> list[int]:
        call = {"function": {"name": "f", "arguments": json.dumps({"x": text})}, "id": "c"}
        messages = [
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": text},
        ]
        return tokenizer.encode(prompt_of(models[name], messages=messages), add_special_tokens=False)

    def controls(token_ids: list[int]) -> list[str]:
        return [tokenizer.piece(i) for i in token_ids if tokenizer.piece(i) in listed]

    assert controls(ids(typed)) == controls(ids("harmless"))
    assert tokenizer.decode(ids(typed), skip_special_tokens=False).count(typed) == 4


def test_a_result_without_a_call_is_refused(models: dict[str, ServedModel]) -> None:
    """V3.2 knows results by the order of their calls alone, so one too many has no meaning."""
    with pytest.raises(ChatTemplateError, match="no tool call"):
        prompt_of(
            models["deepseek_v32"],
            messages=[
                {"role": "user", "content": "?"},
                {"role": "tool", "tool_call_id": "c", "content": "20"},
            ],
        )


def test_a_call_whose_arguments_are_no_object_stays_readable(models: dict[str, ServedModel]) -> None:
    """What a model once wrote wrongly comes back as text, instead of an error in every later request."""
    call = {"id": "c", "function": {"name": "f", "arguments": "[1"}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    for model in models.values():
        assert 'name="arguments" string="true">[1<' in prompt_of(model, messages=messages).text


@pytest.mark.parametrize(
    ("model_type", "template", "tokens", "expected"),
    [
        ("deepseek_v32", "{{ messages[0].content }}!", (), "Hi!"),  # V3.2-Exp has one of its own
        ("deepseek_v3", None, (), None),
        ("deepseek_v4", None, ("<｜System｜>",), None),  # V4.1 writes conversations in another way
    ],
)
def test_only_models_without_a_template_get_ours(
    tmp_path: Path, model_type: str, template: str | None, tokens: tuple[str, ...], expected: str | None
) -> None:
    """The checkpoint's own template wins, and no other family's is guessed."""
    found = Tokenizer.from_dir(model_files(tmp_path, model_type, template, tokens)).chat_template
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert found.render([{"role": "user", "content": "Hi"}]) == expected


def test_a_given_template_wins(tmp_path: Path) -> None:
    """`--chat-template` replaces ours, too."""
    file = tmp_path / "mine.jinja"
    file.write_text("mine")
    found = Tokenizer.from_dir(model_files(tmp_path, "deepseek_v32"), str(file)).chat_template
    assert found is not None
    assert found.source == "mine"


def test_v4_calls_are_in_an_element_of_their_own_name() -> None:
    """V3.2's element is text to V4's parser, whose markers are tokens in part."""
    plan = OutputPlan(reasoning_parser=None, tool_parser="deepseek_v4", tools=(ToolSpec("f", {}),))
    call = '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n'
    for name, content in (("tool_calls", ""), ("function_calls", "<｜DSML｜function_calls>")):
        text = f"<｜DSML｜{name}>\n{call}</｜DSML｜{name}>"
        result = parsed(read(plan, in_characters(text), ("｜DSML｜",)))
        assert result.calls == (("f", {}),)
        assert result.content.strip().startswith(content)
