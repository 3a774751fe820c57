"""Guards what single formats have that others have not: elements in elements, ids, tags around answers."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.parsers.events import OutputPlan, ToolSpec
from gateway.parsers.registry import REASONING, thought_bounds
from tests.helpers.parser_streams import (
    RECORDED,
    Parsed,
    in_bytes,
    in_characters,
    in_tokens,
    parsed,
    plan_for,
    read,
    tokens_of,
    whole,
)
from tests.unit.gateway.parsers.test_parsers import recorded_plan

NS = "]<]minimax[>["
NESTED = {
    "type": "object",
    "properties": {
        "people": {"type": "array", "items": {"$ref": "#/$defs/person"}},
        "none": {"type": "array", "items": {"type": "string"}},
        "free": {},
        "note": {"type": "string"},
    },
    "$defs": {
        "person": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    },
}


@pytest.mark.parametrize("cut", [in_characters, in_bytes, whole])
def test_elements_become_arrays_and_objects_by_their_schema(cut: Any) -> None:
    """MiniMax-M3: leaves are of the types that the schema gives them; without one, what they look like."""
    text = (
        'NS<tool_call>\nNS<invoke name="f">'
        "NS<people>\nNS<item>NS<name>12NS</name>NS<age>12NS</age>NS</item>\n"
        "NS<item>NS<name>ÜNS</name>NS</item>NS</people>"
        "NS<none>NS</none>NS<free>NS<a>1NS</a>NS<b>NS<item>xNS</item>NS</b>NS</free>"
        "NS<note> <b>bold</b> NS</note>NS</invoke>\nNS</tool_call>"
    ).replace("NS", NS)
    plan = OutputPlan(tool_parser="minimax_m3", tools=(ToolSpec("f", NESTED),))
    (call,) = parsed(read(plan, cut(text))).calls
    assert call[1] == {
        "people": [{"name": "12", "age": 12}, {"name": "Ü"}],
        "none": [],
        "free": {"a": 1, "b": ["x"]},
        "note": " <b>bold</b> ",
    }
    # As the tokenizer has it, the mark before a tag is a token, and the tags are text.
    tokens = [NS, "<tool_call>", "</tool_call>"]
    assert parsed(read(plan, in_tokens(text, tokens), tokens)).calls == (call,)


def test_elements_that_are_not_closed_end_with_the_call() -> None:
    """What a model leaves out costs no other argument and no other call."""
    text = (
        'NS<tool_call>NS<invoke name="f">NS<note>oneNS<invoke name="f">NS<free>NS<a>1'
        "NS</invoke>NS</tool_call>"
    ).replace("NS", NS)
    plan = OutputPlan(tool_parser="minimax_m3", tools=(ToolSpec("f", NESTED),))
    result = parsed(read(plan, in_characters(text)))
    assert result.calls == (("f", {"note": "one"}), ("f", {"free": {"a": 1}}))
    cut_off = parsed(read(plan, in_characters(text[: text.index("one") + 2])))
    assert cut_off.calls == (("f", '{"note": "on'),)


def test_ids_are_what_the_formats_templates_take_back() -> None:
    """Kimi's as the model wrote them, Mistral's of nine letters and digits."""
    kimi = parsed(read(recorded_plan("kimi_k2"), whole(RECORDED["kimi_k2"])))
    assert kimi.ids == ("functions.get_weather:0", "functions.get_time:1")
    for text in (RECORDED["mistral"], '[TOOL_CALLS][{"name": "get_time", "arguments": {}}]'):
        ids = parsed(read(recorded_plan("mistral"), whole(text))).ids
        assert all(len(one) == 9 and one.isalnum() for one in ids)


@pytest.mark.parametrize("space", [" ", ""])
def test_a_call_of_gpt_oss_may_begin_with_its_recipient(space: str) -> None:
    """The prompt ends within a message's header, of which the recipient may come before the channel; text
    that only looks like it stays text."""
    output = (
        f'{space}to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{{"a": 1}}<|call|>'
    )
    plan = plan_for("gpt_oss", "gpt_oss")
    for size in (1, 5, len(output)):
        pieces = [(output[start : start + size], False) for start in range(0, len(output), size)]
        assert parsed(read(plan, pieces)) == Parsed(calls=(("get_weather", {"a": 1}),))
    for text in (f"{space}to=functions.get_weather", f"{space}to be or not", f"{space}t"):
        assert parsed(read(plan, [(text, False)])).content == text


# For each family: its output, what it means, and which parsers read it.
ANSWERS = {
    "gemma4": (
        "<|channel>thought\nOn Oslo.<channel|>It rains.",
        Parsed("It rains.", "On Oslo."),
    ),
    "solar_open": (
        "<|think|>On Oslo.<|end|><|begin|>assistant<|content|>It rains.<|end|>",
        Parsed("It rains.", "On Oslo."),
    ),
    "ernie45": (
        "<think>\nOn Oslo.\n</think>\n\n<response>\nIt rains.\n</response>\n",
        Parsed("It rains.", "On Oslo."),
    ),
    "hunyuan_a13b": (
        "<think>\nOn Oslo.\n</think>\n<answer>\nIt rains.\n</answer>",
        Parsed("It rains.", "On Oslo."),
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_stands_around_thoughts_and_answers_is_in_neither(name: str) -> None:
    """Such text is in neither, as tokens and as text, however it is cut; an answer without a frame keeps what
    it says of one.
    """
    text, meaning = ANSWERS[name]
    plan = plan_for(None, name)
    tokens = tokens_of(plan)
    for pieces in (whole(text), in_characters(text), in_bytes(text)):
        result = parsed(read(plan, pieces))
        assert (result.content.strip(), result.reasoning) == (meaning.content, meaning.reasoning)
    result = parsed(read(plan, in_tokens(text, tokens), tokens))
    assert (result.content.strip(), result.reasoning) == (meaning.content, meaning.reasoning)
    for end in REASONING[name].after_answer:
        prose = f"The tag {end} ends an answer."
        assert parsed(read(plan, in_characters(prose))) == Parsed(prose)


def test_solars_parts_of_a_turn_are_content_and_calls() -> None:
    """A thought, a text and calls, each with a header of its own."""
    calls = RECORDED["solar_open"].removeprefix("Let me see.")
    text = f"<|think|>Hm.<|end|><|begin|>assistant<|content|>Let me see.<|end|><|begin|>assistant{calls}"
    plan = plan_for("solar_open", "solar_open")
    tokens = tokens_of(plan)
    for result in (
        parsed(read(plan, in_characters(text))),
        parsed(read(plan, in_tokens(text, tokens), tokens)),
    ):
        assert result == Parsed("Let me see.", "Hm.", parsed(read(plan, whole(calls))).calls)
        assert result.ids == ("a1b2c3d4e5", "f6g7h8i9j0")


GEMMA = {
    # Objects and arrays in one another, keys and strings in either kind of quotes.
    """f{a:{<|"|>x y<|"|>:[1,[<|"|>}<|"|>]],"z":"\\"q\\""},b:[]}""": {
        "a": {"x y": [1, ["}"]], "z": '"q"'},
        "b": [],
    },
    # Words are what the schema says, else strings; spaces and commas that are too many are left out.
    "f{ n : 3 , on:True,,word: some words,none:null,e:}": {
        "n": 3, "on": True, "word": "some words", "none": None, "e": None,
    },
    # What is missing ends with the call.
    "f{a:{b:[1,2": {"a": {"b": [1, 2]}},
    """f{s:<|"|>open""": {"s": "open"},
    "f{}": {},
}  # fmt: skip


@pytest.mark.parametrize("written", GEMMA)
def test_gemmas_objects_are_json(written: str) -> None:
    """However they are cut, with tokens and without."""
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}, "n": {"type": "integer"}}}
    plan = OutputPlan(tool_parser="gemma4", tools=(ToolSpec("f", schema),))
    text = f"<|tool_call>call:{written}<tool_call|>"
    tokens = tokens_of(plan)
    expected = Parsed(calls=(("f", GEMMA[written]),))
    assert parsed(read(plan, in_tokens(text, tokens), tokens)) == expected
    if not written.startswith("f{s:"):  # where nothing is a token, a string may contain any text
        for pieces in (whole(text), in_characters(text)):
            assert parsed(read(plan, pieces)) == expected


class _Spells:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]


def test_a_grammar_begins_after_the_frame_of_an_answer() -> None:
    """What models write between a thought and an answer, or a call, is no part of what a grammar says."""

    def bounds(parser: str, calls_only: bool) -> tuple[str, str]:
        found = thought_bounds(parser, False, calls_only, _Spells())  # type: ignore[arg-type]
        return "".join(map(chr, found.begin)), "".join(map(chr, found.end))

    assert bounds("gemma4", False) == ("<|channel>thought\n", "<channel|>")
    assert bounds("solar_open", False) == ("<|think|>", "<|end|><|begin|>assistant<|content|>")
    assert bounds("solar_open", True) == ("<|think|>", "<|end|><|begin|>assistant")


@pytest.mark.parametrize(
    ("tools", "reasoning", "tokens"),
    [
        ("glm45", "glm45", ["<tool_call>", "</tool_call>", "<think>", "</think>"]),
        ("glm47", "glm45", ["<tool_call>", "</tool_call>", "<think>", "</think>"]),
        ("minimax_m2", "minimax_m2", ["<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"]),
        ("step3p5", "step3p5", ["<tool_call>", "</tool_call>", "<think>", "</think>"]),
        (
            "deepseek_v31",
            "deepseek_v31",
            ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"],
        ),
        ("deepseek_v32", "deepseek_v31", ["｜DSML｜"]),
        ("deepseek_v4", "deepseek_v31", ["｜DSML｜"]),
        ("hy_v4:6124c78e", "hy_v4:6124c78e", ["<tool_calls:6124c78e>", "<tool_call:6124c78e>"]),
    ],
)
def test_a_call_ends_a_thought_that_was_left_open(tools: str, reasoning: str, tokens: list[str]) -> None:
    """Models forget the tag; what begins as a call with the tokenizer's own token is none of the thought."""
    plan = plan_for(tools, reasoning, starts_in_reasoning=True)
    text = RECORDED[tools].replace("Let me see.", "So.", 1)
    result = parsed(read(plan, in_tokens(text, tokens), tokens))
    assert (result.reasoning, result.content) == ("So.", "")
    assert [name for name, _ in result.calls] == ["get_weather", "get_time"]
    # Without the token it may be what the thought is about.
    assert parsed(read(plan, in_characters(text))).calls == ()
