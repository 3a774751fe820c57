"""Compares our reader of gpt-oss's outputs with `openai-harmony`, on random conversations, token by token.

    .venv/bin/python -m tests.tools.compare_harmony DIRECTORY --outputs 1000

DIRECTORY holds `o200k_base.tiktoken`, the one vocabulary that library reads, under that name: OpenAI
publishes it, and the package litellm has it as
`litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

from openai_harmony import HarmonyEncoding, Role, StreamableParser, load_harmony_encoding

from gateway.parsers.harmony import ALL
from tests.helpers.parser_streams import Parsed, parsed, plan_for, read

_WORDS = (
    "fox ",
    "über ",
    "東京",
    "😀 ",
    "\n\n",
    "a < b ",
    "{",
    '"to=functions.x" ',
    "analysis ",
    "</think> ",
    "  ",
)


def _text(draw: random.Random) -> str:
    return "".join(draw.choice(_WORDS) for _ in range(draw.randint(1, 12))) + "end"


def output(draw: random.Random) -> str:
    """What a model could write after `<|start|>assistant`: thoughts, remarks, and a call or an answer."""
    made = []
    for _ in range(draw.randint(0, 3)):
        channel = draw.choice(("analysis", "commentary"))
        made.append(f"<|channel|>{channel}<|message|>{_text(draw)}<|end|><|start|>assistant")
    if draw.random() < 0.5:
        arguments = json.dumps({"city": _text(draw), "days": draw.randint(0, 9)}, ensure_ascii=False)
        recipient = "to=functions.get_weather"
        head = draw.choice((f"<|channel|>commentary {recipient} ", f" {recipient}<|channel|>commentary "))
        return "".join(made) + f"{head}<|constrain|>json<|message|>{arguments}<|call|>"
    return "".join(made) + f"<|channel|>final<|message|>{_text(draw)}<|return|>"


def reference(encoding: HarmonyEncoding, tokens: list[int]) -> Parsed:
    """Returns what openai-harmony makes of it: analysis is reasoning, messages to functions are calls."""
    parser = StreamableParser(encoding, Role.ASSISTANT)
    for token in tokens:
        parser.process(token)
    parser.process_eos()
    content, reasoning, calls = "", "", []
    for message in parser.messages:
        text = "".join(part.text for part in message.content)
        if (message.recipient or "").startswith("functions."):
            calls.append((str(message.recipient).removeprefix("functions."), json.loads(text)))
        elif message.channel == "analysis":
            reasoning += text
        else:
            content += text
    return Parsed(_dense(content), _dense(reasoning), tuple(calls), ())


def _dense(text: str) -> str:
    """Without white space: that between thoughts and answers is left out, as of all models."""
    return "".join(text.split())


def ours(encoding: HarmonyEncoding, tokens: list[int]) -> Parsed:
    """Returns the same tokens as the gateway reads them."""
    made: list[tuple[str, bool]] = []
    plain: list[int] = []
    for token in tokens:
        if not _is_marker(token):
            plain.append(token)
            continue
        if plain:
            made.append((encoding.decode_utf8(plain), False))
            plain = []
        made.append((encoding.decode_utf8([token]), True))
    found = parsed(read(plan_for("gpt_oss", "gpt_oss"), made, ALL))
    return replace(found, content=_dense(found.content), reasoning=_dense(found.reasoning))


def _is_marker(token: int) -> bool:
    return token >= 199_998


def main() -> int:
    """Returns 1 with the first output that is read differently."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("directory", type=Path)
    options.add_argument("--outputs", type=int, default=1000)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(arguments.directory)
    encoding = load_harmony_encoding("HarmonyGptOss")
    for seed in range(arguments.seed, arguments.seed + arguments.outputs):
        text = output(random.Random(seed))
        tokens = encoding.encode(text, allowed_special="all")
        expected, found = reference(encoding, tokens), ours(encoding, tokens)
        if (found.content, found.reasoning, found.calls) != (
            expected.content,
            expected.reasoning,
            expected.calls,
        ):
            print(f"seed {seed}: {text!r}\nopenai-harmony: {expected}\nours: {found}")
            return 1
    print(f"{arguments.outputs} outputs are read alike")
    return 0


if __name__ == "__main__":
    sys.exit(main())
