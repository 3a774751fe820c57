"""`python -m tests.tools.vllm_servers KIND`: what vLLM's tests of its HTTP server talk to; prints its URL.

demo: `moebius serve` of the demo model under any name; answers to requests without a limit end after 300
tokens, by the checkpoint's `generation_config.json`: the model would go on to the end of its context.
thoughts: the same, with a chat template that opens a thought. rules: the gateway with a model that thinks and
calls the tools it is offered, as the small Qwen3 of vLLM's tests does.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
import threading
from pathlib import Path

from app.demo_model import build_demo_model
from protos import engine_pb2 as pb
from tests.clients.scripted_model import ScriptedModel, call, instance_of, read_prompt, serve
from tests.helpers.stack import running_stack

ANY_NAME = "*"
THOUGHTS = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n<think>"
    "{%- if enable_thinking is defined and not enable_thinking -%}\n\n</think>\n\n{%- endif -%}"
    "{%- endif -%}"
)


def answer_from_facts(prompt: str) -> str:
    """Returns the answer to what tests ask: products of what was said, a user's name, an echo of all else."""
    turns = re.findall(r"<\|start\|>(\w+)\n(.*?)<\|end\|>", prompt, re.DOTALL)
    said = {role: [content.strip() for who, content in turns if who == role] for role, _ in turns}
    last = said.get("user", [""])[-1]
    answer = f"You said: {last}"
    if product := re.search(r"(\d+) \* (\d+)", last):
        answer = f"It is {int(product[1]) * int(product[2])}."
    elif (factor := re.search(r"Multiply the result by (\d+)", last)) and (
        result := re.search(r"\d+", said["assistant"][-1])
    ):
        answer = f"It is {int(result[0]) * int(factor[1])}."
    elif re.search(r"my (real )?name.*\?", last):
        names = re.findall(r"my (?:real )?name is (?!not\b)(\w+)", " ".join(said["user"]), re.IGNORECASE)
        answer = names[-1] if names else "I do not know."
    ending = re.search(r"Finish the answer with (\w+)", " ".join(said.get("system", [])))
    return f"{answer} {ending[1]}." if ending else answer


class Rules(ScriptedModel):
    """Thinks, unless the prompt says that it is over; calls the tool that it has to, those that the user
    names, or the first."""

    def reply(self, prompt: str, request: pb.GenerateRequest) -> str:
        """Returns its output."""
        thought = (
            "" if prompt.endswith("</think>\n\n") else "<think>\nThe user wants an answer.\n</think>\n\n"
        )
        read = read_prompt(prompt)
        lines = [line for line in prompt.splitlines() if line.startswith('{"type": "function"')]
        tools = [json.loads(line)["function"] for line in lines]
        forced = request.constraint.lark
        named = [tool for tool in tools if re.search(rf"\b{tool['name']}\b", forced)]
        if (tools and not read.results) or named:
            allowed = named or tools
            asked = [tool for tool in allowed if tool["name"] in read.user]
            number = prompt.count("<|start|>assistant")
            calls = (
                call(tool["name"], **instance_of(tool["parameters"], number=number))
                for tool in (asked or allowed[:1])
            )
            return thought + "\n".join(calls)
        return thought + answer_from_facts(prompt)


def brief_model(directory: Path) -> Path:
    """Returns the demo model, with a usual length of answers."""
    source = build_demo_model()
    directory.mkdir()
    for file in source.iterdir():
        (directory / file.name).symlink_to(file)
    generation = directory / "generation_config.json"
    settings = json.loads(generation.read_text())
    generation.unlink()
    generation.write_text(json.dumps({**settings, "max_new_tokens": 300}))
    return directory


def main() -> None:
    """Serves until SIGTERM."""
    kind = sys.argv[1]
    if kind == "rules":
        serve(Rules, (ANY_NAME,))
        return
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with tempfile.TemporaryDirectory(prefix="moebius-vllm-tests-") as name:
        directory = Path(name)
        # In bfloat16 a prompt from the cache may be answered in other words than the same prompt before.
        flags = ["--model-aliases", ANY_NAME, "--expert-servers", "1", "--dtype", "float32"]
        if kind == "thoughts":
            (directory / "thoughts.jinja").write_text(THOUGHTS)
            flags += ["--chat-template", str(directory / "thoughts.jinja"), "--reasoning-parser", "qwen3"]
        with running_stack(brief_model(directory / "model"), directory, *flags, timeout_s=600) as stack:
            print(stack.base_url, flush=True)
            stop.wait()


if __name__ == "__main__":
    main()
