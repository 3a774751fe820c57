"""A model that follows rules instead of weights, behind the real gateway: agent loops that always repeat.

It reads the rendered prompt as a model would, and answers in Hermes' format: tool calls in tags, thoughts in
tags. Run as `python -m tests.clients.scripted_model`; a line of standard output is the gateway's URL.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from protos import engine_pb2 as pb
from tests.helpers import tls_everywhere
from tests.helpers.fake_engine import FakeEngine, Script, serving
from tests.helpers.gateway_server import gateway_config, running_gateway
from tests.helpers.tiny_tokenizer import byte_level_tokenizer, write_tokenizer

CONTEXT = 65_536
IMAGE = "<|image|>"
WEATHER = {"Oslo": -3, "Rome": 21}  # degrees Celsius; the tools that clients bring know the same
TEMPLATE = (
    "{% if tools %}<|start|>system\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Answer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|end|>\n{% endif %}'
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content or [] %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@dataclass(frozen=True)
class Prompt:
    """The parts of a prompt that the rules use; filled by `read_prompt`."""

    tools: frozenset[str]
    user: str  # the last user's turn
    results: tuple[str, ...]  # tool results after it
    first_user: str
    images: int
    system: str


def read_prompt(text: str) -> Prompt:
    """Returns the turns of a prompt that `TEMPLATE` rendered."""
    turns = re.findall(r"<\|start\|>(\w+)\n(.*?)<\|end\|>", text, re.DOTALL)
    users = [(place, content) for place, (role, content) in enumerate(turns) if role == "user"]
    last, user = users[-1] if users else (0, "")
    results = tuple(content for role, content in turns[last:] if role == "tool")
    offered = "".join(
        content for role, content in turns if role == "system" and content.startswith("# Tools")
    )
    said = [content for role, content in turns if role == "system" and not content.startswith("# Tools")]
    return Prompt(
        frozenset(re.findall(r'"name": "(\w+)"', offered)),
        user.replace(IMAGE, "").strip(),
        results,
        users[0][1].strip() if users else "",
        text.count(IMAGE),
        " ".join(said),
    )


def call(name: str, /, **arguments: Any) -> str:
    """Returns a call as the model writes it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def instance_of(schema: dict[str, Any], definitions: dict[str, Any] | None = None, number: int = 0) -> Any:
    """Returns a small value that a schema allows, another for each `number`; for the checks' keywords."""
    definitions = definitions or schema.get("$defs", {})
    if "$ref" in schema:
        return instance_of(definitions[schema["$ref"].rpartition("/")[2]], definitions, number)
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return instance_of(schema["anyOf"][0], definitions, number)
    kind = str(schema.get("type"))
    if kind == "object":
        properties = schema.get("properties", {}).items()
        return {name: instance_of(one, definitions, number) for name, one in properties}
    if kind == "array":
        return [instance_of(schema["items"], definitions, number)] * schema.get("minItems", 1)
    text = f"text {number}" if number else "text"
    numbers = {"integer": schema.get("minimum", 1) + number, "number": number + 0.5}
    return {**numbers, "boolean": True, "null": None}.get(kind, text)


def reply(prompt: Prompt) -> str:
    """Returns the model's output."""
    thought = "<think>\nThe user wants something.\n</think>\n\n" if "think" in prompt.user else ""
    city = next((name for name in WEATHER if name in prompt.user), "")
    if "get_weather" in prompt.tools and city:
        return thought + with_tools(prompt, city)
    if prompt.images:
        return f"{thought}I see {prompt.images} image(s)."
    if "first thing" in prompt.user:
        return f"{thought}The first thing was: {prompt.first_user}"
    return f"{thought}You said: {prompt.user}" + (f" [system: {prompt.system}]" if prompt.system else "")


def with_tools(prompt: Prompt, city: str) -> str:
    """Returns one step of a loop in which the client runs the tools."""
    results = prompt.results
    if "Fahrenheit" in prompt.user:  # one after the other
        if not results:
            return "I look it up.\n" + call("get_weather", city=city)
        if len(results) == 1:
            found = re.search(r"-?\d+", results[0])
            return call("to_fahrenheit", celsius=int(found[0]) if found else 0)
        return f"In {city} it is {results[-1]} degrees Fahrenheit."
    cities = [name for name in WEATHER if name in prompt.user]
    if not results:  # all at once
        return "\n".join(call("get_weather", city=name) for name in cities)
    return "Weather: " + "; ".join(f"{name} {result}" for name, result in zip(cities, results, strict=False))


class ScriptedModel(FakeEngine):
    """The engine's side: prompt ids in, the rules' tokens out."""

    placeholder = -1

    def GetModelInfo(self, request: Any, context: Any) -> pb.GetModelInfoResponse:
        """Returns the fake engine's facts, with images."""
        info = super().GetModelInfo(request, context)
        info.supports_vision, info.image_token_id = True, self.placeholder
        info.served_model_name = "scripted"
        return info

    def reply(self, prompt: str, request: pb.GenerateRequest) -> str:
        """Returns the output where no schema decides it."""
        return reply(read_prompt(prompt))

    def _output(self, script: Script, request: pb.GenerateRequest, index: int) -> tuple[list[int], str]:
        text = self.reply(self.decode(request.tokenized.input_ids), request)
        if request.constraint.WhichOneof("kind") == "json_schema":
            text = json.dumps(instance_of(json.loads(request.constraint.json_schema)))
            if request.constraint.start_token_ids or request.constraint.after_token_ids:
                text = "<think>\nJSON, then.\n</think>\n\n" + text
        if request.constraint.WhichOneof("kind") == "json_object":
            text = '{"answer": 42}'
        if not request.sampling_params.HasField("max_tokens"):
            request.sampling_params.max_tokens = CONTEXT  # the meaning of unset
        return super()._output(Script(text=text), request, index)


def serve(kind: type[ScriptedModel], aliases: tuple[str, ...] = ()) -> None:
    """Prints the gateway's URL and serves until SIGTERM; `aliases`: other names of the model."""
    tls_everywhere.follow()
    with tempfile.TemporaryDirectory(prefix="moebius-clients-") as name:
        directory = Path(name)
        tokenizer = byte_level_tokenizer()
        tokenizer.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
        write_tokenizer(directory, tokenizer, TEMPLATE)
        engine = kind(directory, tokenizer, CONTEXT)
        engine.placeholder = int(tokenizer.token_to_id(IMAGE) or 0)
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        address = f"unix:{directory}/engine.sock"
        config = gateway_config(address)
        named = config.model.model_copy(update={"model_aliases": aliases})
        config = config.model_copy(update={"model": named})
        with serving(engine, address), running_gateway(config) as url:
            sys.stdout.write(f"\n{url}\n")  # at once: log lines of other threads go there, too
            sys.stdout.flush()
            stop.wait()


if __name__ == "__main__":
    serve(ScriptedModel)
