"""Guards chat templates: the same text as transformers renders, in a sandbox, with clear refusals."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.text.conversation import ChatTemplate, ChatTemplateError
from tests.helpers.tiny_tokenizer import BOS, CHAT_TEMPLATE, EOS

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "héllo 東京"},
    {"role": "assistant", "content": "  Hi  "},
    {"role": "user", "content": "again"},
]
RICH = """{%- set ns = namespace(count=0) -%}
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
{% generation %}[{{ ns.count }}|{{ message.role }}] {{ message.content | trim }}{% endgeneration %}
    {{ message | tojson }}
{%- endfor %}
{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}
{%- if add_generation_prompt %}[assistant]{% endif %}
"""


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, RICH], ids=["plain", "rich"])
@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}])
def test_same_text_as_transformers(source: str, opens: bool, kwargs: dict[str, Any]) -> None:
    """Loop controls, namespaces, tojson, generation blocks and keyword arguments render alike."""
    ours = ChatTemplate(source, {"bos_token": BOS, "eos_token": EOS})
    theirs: Any = render_jinja_template(
        [CONVERSATION],
        chat_template=source,
        add_generation_prompt=opens,
        bos_token=BOS,
        eos_token=EOS,
        **kwargs,
    )
    assert ours.render(CONVERSATION, add_generation_prompt=opens, kwargs=kwargs) == theirs[0][0]


def test_final_message_is_left_open() -> None:
    """Continuing cuts right after the content, its trailing space included where the template kept it."""
    template = ChatTemplate(CHAT_TEMPLATE, {})
    messages = [CONVERSATION[1], {"role": "assistant", "content": "The fox "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("assistant\nThe fox ")


def test_final_message_that_the_template_drops_can_not_be_continued() -> None:
    """A message that is not in the text is refused, instead of continuing something else."""
    template = ChatTemplate("{% for m in messages[:1] %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(ChatTemplateError, match="final message"):
        template.render(
            [*CONVERSATION[1:3], {"role": "assistant", "content": "zzz"}],
            add_generation_prompt=False,
            continue_final_message=True,
        )


def test_developer_becomes_system_unless_known() -> None:
    """Templates that never name the role get `system`, so that its text is not lost."""
    source = "{% for m in messages %}{{ m.role }};{% endfor %}"
    messages = [{"role": "developer", "content": "x"}]
    assert ChatTemplate(source, {}).render(messages) == "system;"
    assert ChatTemplate(source + "{# developer #}", {}).render(messages) == "developer;"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages[99].content }}",
        "{{ 1 / 0 }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({}) }}",
    ],
)
def test_refusals_are_chat_template_errors(source: str) -> None:
    """A template that refuses, breaks, or reaches outside the sandbox gives one kind of error."""
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render(CONVERSATION)


def test_a_template_may_have_a_queue() -> None:
    """llama.cpp's templates do; what the caller gave stays as it was."""
    grown = "{% set seen = [] %}{% for t in tools %}{% set _ = seen.append(t.name) %}{% endfor %}"
    tools = [{"name": "a"}, {"name": "b"}]
    assert (
        ChatTemplate(grown + "{{ seen.pop(0) }}, {{ seen }}", {}).render(CONVERSATION, tools=tools)
        == "a, ['b']"
    )
    assert ChatTemplate("{{ tools.append(1) }}{{ messages.pop() and 1 }}", {}).render(
        CONVERSATION, tools=tools
    )
    assert len(tools) == 2


def test_broken_template_names_the_line() -> None:
    """A syntax error is found when the template is read, with its line."""
    with pytest.raises(ChatTemplateError, match="line 2"):
        ChatTemplate("ok\n{% if %}", {})


def test_ernies_text_for_an_image_becomes_its_token() -> None:
    """The released template writes a text that only the processor released next to it knows."""
    source = (
        "{% for m in messages %}<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>{{ m.content }}{% endfor %}"
    )
    text = ChatTemplate(source, {}).render([{"role": "user", "content": "<|image@placeholder|>"}])
    # What users type stays as it is.
    assert text == "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|><|image@placeholder|>"
