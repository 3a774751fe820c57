"""A gateway in front of a scripted engine whose model thinks and calls tools, for the tests of all APIs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from tokenizers import AddedToken

from tests.helpers.fake_engine import FakeEngine, Script, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

# What matters of Qwen3's: tools in the system turn, thoughts in tags, calls in tags.
TEMPLATE = (
    "{% if tools %}<|start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|end|>\n{% endif %}'
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
GREEDY = "The quick brown fox jumps over the lazy dog."
THOUGHT = "<think>\nThe fox wants\n the weather.\n</think>\n\n"


@dataclass
class AgentGateway:
    """Gateway and engine; filled by `agent_gateway`."""

    url: str
    engine: FakeEngine

    def says(self, text: str, **script: Any) -> None:
        """Forgets what was sent, and lets the model answer with `text`."""
        self.engine.reset()
        self.engine.script = Script(text=text, **script)

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Returns the answer to a request of these fields."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)

    def client(self, key: str = "none") -> openai.OpenAI:
        """Returns OpenAI's client, which shows errors instead of retrying."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def prompt(self) -> str:
        """What the engine was sent last."""
        return self.engine.decode(self.engine.seen.requests[-1].tokenized.input_ids)


@contextlib.contextmanager
def agent_gateway(directory: Path, template: str = TEMPLATE, **settings: Any) -> Iterator[AgentGateway]:
    """Runs both; `settings` are leaves of the `gateway` section."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKERS])
    write_tokenizer(directory, tokenizer, template)
    address = f"unix:{directory}/engine.sock"
    engine = FakeEngine(directory, tokenizer, context=4096, model_type="qwen3_moe")
    with serving(engine, address), running_gateway(gateway_config(address, **settings)) as url:
        yield AgentGateway(url, engine)
