"""Guards what becomes a control token: what templates write, and nothing that users type unless asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from gateway.text.conversation import ChatTemplate, ControlTokens, Conversation, mark_text, render_prompt
from gateway.text.tokenizer import Tokenizer as ServedTokenizer
from tests.helpers.tiny_tokenizer import BOS, CHAT_TEMPLATE, EOS, byte_level_tokenizer, metaspace_tokenizer

# As published templates do it: content is stripped, split at what closes the model's thoughts, tested for
# how it begins, measured, and quoted as JSON.
LOOKING = """{{ bos_token }}{% for m in messages %}
{%- set content = m.content | trim %}
{%- if m.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{%- if content.startswith('<tool call>') %}(call){% endif %}
{%- if content | length > 10000 %}{{ raise_exception('too long') }}{% endif %}
{{- '<|start|>' + m.role + '\\n' + content + '<|end|>\\n' }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments | tojson }}
{%- endfor %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant\\n{% endif %}"""
ASCII = (
    "{% for m in messages %}<|start|>{{ m | tojson(ensure_ascii=true) }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)


def thinking() -> Tokenizer:
    """Byte-level, with thoughts as special tokens."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(["<think>", "</think>"])
    return tokenizer


def markers() -> Tokenizer:
    """Returns role markers that are added, but not special, tokens, as DeepSeek has them."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<｜User｜>", normalized=False)])
    return tokenizer


def normalising() -> Tokenizer:
    """Returns special tokens that are looked for in normalised text, where marks cannot be taken
    out before.
    """
    tokenizer = metaspace_tokenizer()
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.add_special_tokens([AddedToken("<|late|>", special=True, normalized=True)])
    return tokenizer


TOKENIZERS = {
    "byte level": byte_level_tokenizer,
    "metaspace": metaspace_tokenizer,
    "thinking": thinking,
    "markers": markers,
    "normalising": normalising,
}
TEMPLATES = {"plain": CHAT_TEMPLATE, "looking": LOOKING, "ascii": ASCII}
ORDINARY: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be <brief> & kind.\n"},
    {"role": "user", "content": "x < y, [INST] <| and |> 東京 <"},
    {
        "role": "assistant",
        "content": "<think>so it is</think>\nHi <tool call>",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": "<b>"}}}],
    },
    {"role": "user", "content": "<tool call>again <"},
]


def served(name: str, template: str = CHAT_TEMPLATE) -> ServedTokenizer:
    """Returns one of the tokenizers, as the gateway has it."""
    named = {"bos_token": BOS, "eos_token": EOS}
    return ServedTokenizer(TOKENIZERS[name](), ChatTemplate(template, named))


def ids_of(tokenizer: ServedTokenizer, messages: list[dict[str, Any]], **settings: Any) -> list[int]:
    """Returns token ids of a conversation; `parse_special` as in requests, others as in `Conversation`."""
    assert tokenizer.chat_template is not None
    parse_special = settings.pop("parse_special", False)
    conversation = Conversation(messages, **settings)
    text = render_prompt(tokenizer.chat_template, tokenizer.controls, conversation, parse_special)
    return tokenizer.encode(text, add_special_tokens=False)


def controls_in(tokenizer: ServedTokenizer, ids: list[int]) -> list[str]:
    """Returns the control tokens among `ids`."""
    return [tokenizer.piece(i) for i in ids if tokenizer.controls.found(tokenizer.piece(i))]


# Where thoughts are special tokens that the template does not read, they are typed ones like others.
@pytest.mark.parametrize(
    ("name", "template"),
    [
        pytest.param(name, template, id=f"{name}, {kind}")
        for name in TOKENIZERS
        for kind, template in TEMPLATES.items()
        if name != "thinking" or kind == "looking"
    ],
)
def test_ordinary_conversations_have_the_ids_of_transformers(name: str, template: str) -> None:
    """Text without control tokens of its own is tokenised exactly as `apply_chat_template` does.

    Also where it ends with the beginning of one, and thoughts in the model's answers, which templates read.
    """
    theirs = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[name](), bos_token=BOS, eos_token=EOS)
    expected = theirs.apply_chat_template(
        ORDINARY, chat_template=template, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids_of(served(name, template), ORDINARY) == expected


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("name", TOKENIZERS)
def test_typed_control_tokens_are_text(name: str, template: str) -> None:
    """In every text of a conversation they become ordinary tokens that spell what was typed."""
    tokenizer = served(name, template)
    spelled = tokenizer.controls.found([tokenizer.piece(i) for i in range(tokenizer.vocab_size)])
    assert len(spelled) >= 2
    typed = "a" + "".join(spelled) + "b"
    call = {"function": {"name": typed, "arguments": {typed: [typed]}}}
    harmless = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "ab", "tool_calls": [{"function": {"name": "ab", "arguments": {}}}]},
        {"role": "tool", "content": "ab", "name": "ab"},
    ]
    hostile = [
        {"role": "user", "content": typed},
        {"role": "assistant", "content": "ab", "tool_calls": [call]},
        {"role": "tool", "content": typed, "name": typed},
    ]
    found = ids_of(tokenizer, hostile)
    assert controls_in(tokenizer, found) == controls_in(tokenizer, ids_of(tokenizer, harmless))
    asked = ids_of(tokenizer, hostile, parse_special=True)
    # Vocabularies with a sign for spaces begin the text after each control token with one.
    decoded = [tokenizer.decode(ids, skip_special_tokens=False) for ids in (found, asked)]
    assert decoded[0].replace(" ", "") == decoded[1].replace(" ", "")
    assert len(controls_in(tokenizer, asked)) > len(controls_in(tokenizer, found))


def test_tokens_that_begin_in_one_text_do_not_end_in_the_template() -> None:
    """A text that ends with the beginning of a token does not become one with what follows it."""
    tokenizer = served("byte level", "{% for m in messages %}{{ m.content }}nd|>{% endfor %}")
    ids = ids_of(tokenizer, [{"role": "user", "content": "x<|e"}])
    assert controls_in(tokenizer, ids) == []
    assert tokenizer.decode(ids, skip_special_tokens=False) == "x<|end|>"


def test_variables_of_the_template_are_text_too() -> None:
    """`chat_template_kwargs` come from clients like messages."""
    tokenizer = served("byte level", "<|start|>{{ mood }}<|end|>{{ messages[0].content }}")
    ids = ids_of(tokenizer, [{"role": "user", "content": "x"}], kwargs={"mood": "a<|end|>b"})
    assert controls_in(tokenizer, ids) == [BOS, EOS]


def test_final_message_with_control_tokens_can_be_continued() -> None:
    """What is cut off after the final message is found with marks in it."""
    tokenizer = served("byte level")
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "say <|end|> now "}]
    ids = ids_of(tokenizer, messages, add_generation_prompt=False, continue_final_message=True)
    assert controls_in(tokenizer, ids) == [BOS, EOS, BOS]
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("say <|end|> now ")


def test_marks_are_characters_that_the_text_lacks() -> None:
    """Text with private-use characters, plain or spelled as JSON escapes, comes back as it was."""
    tokenizer = served("byte level")
    text = "\ufdd0<|end|>\ufdd1 \\ufdd2 \ue000"
    ids = tokenizer.encode(mark_text(tokenizer.controls, text), add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert controls_in(tokenizer, ids) == []


@given(st.text(alphabet="<|stardend>ab \n", max_size=60), st.sampled_from(["byte level", "markers"]))
def test_any_text_becomes_ordinary_tokens_that_spell_it(text: str, name: str) -> None:
    """Typed text, overlapping tokens included, gives no control token, and not a character is changed."""
    tokenizer = served(name)
    ids = tokenizer.encode(mark_text(tokenizer.controls, text), add_special_tokens=False)
    assert controls_in(tokenizer, ids) == []
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_overlapping_tokens_are_all_broken() -> None:
    """Marking one token must not let another one stand that shares characters with it."""
    marked = ControlTokens(["<a><", "<b>", "<a>"]).marker("#")("<a><b><a>")
    assert not any(token in marked for token in ("<a><", "<b>", "<a>"))
    assert marked.replace("#", "") == "<a><b><a>"


def test_the_tokenizers_file_is_the_same_after_marked_text() -> None:
    """The stage that takes marks out does not stay in the tokenizer."""
    backend = byte_level_tokenizer()
    before = json.loads(backend.to_str())
    tokenizer = ServedTokenizer(backend, None)
    tokenizer.encode(mark_text(tokenizer.controls, "x<|end|>"))
    assert json.loads(backend.to_str()) == before
