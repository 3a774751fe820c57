"""The scripted engine of `moebius bench gateway`; its arguments are ADDRESS DIRECTORY STEP_MS.

It speaks the contract of protos/engine.proto and makes the tokens of a table instead of a model's: the first
at once, then one per stream and step. Ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gpu_service.server.image_pieces import GatheredRequest
from gpu_service.server.responses import ManyCalls
from lab.bench.gateway.bare import Pace
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc

MODEL = "scripted"
SERVICE = "moebius.engine.v1.Engine"
CONTEXT = 2**21  # tokens: prompts of any length are measured
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
IMAGE, END = "<|image|>", "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else '<|image|>' }}"
    "{% endfor %}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path) -> None:
    """A byte-level vocabulary in which each of WORDS is a token, and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|start|>", END, IMAGE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(["", *WORDS])] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(IMAGE, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


class ScriptedEngine(engine_pb2_grpc.EngineServicer):
    """Answers the methods that the gateway calls."""

    def __init__(self, directory: Path, step_s: float) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._directory = directory
        self._ids = [self._tokenizer.encode(f" {word}").ids[0] for word in WORDS]
        self._pace = Pace(step_s)

    async def GetModelInfo(self, _request: Any, _context: Any) -> pb.GetModelInfoResponse:
        """Returns the facts of the pretended model."""
        return pb.GetModelInfoResponse(
            model_path=str(self._directory),
            is_generation=True,
            max_context_length=CONTEXT,
            vocab_size=self._tokenizer.get_vocab_size(),
            served_model_name=MODEL,
            tokenizer_path=str(self._directory),
            eos_token_ids=[self._special(END)],
            max_req_input_len=CONTEXT - 1,
            max_waiting_requests=2**20,
            default_sampling_params_json="{}",
            supports_vision=True,
            image_token_id=self._special(IMAGE),
        )

    async def GetLoad(self, _request: Any, _context: Any) -> pb.GetLoadResponse:
        """Never any."""
        return pb.GetLoadResponse(max_running_requests=2**20)

    async def Generate(
        self, request: pb.GenerateRequest, _context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Yields one output of `max_tokens` tokens; those of a request without `stream` at once."""
        count = request.sampling_params.max_tokens
        if request.stream:
            for number in range(count):
                if number:
                    await self._pace.step()
                chunk = pb.GenerateStreamChunk(
                    token_ids=[self._token(number)],
                    prompt_tokens=16,
                    completion_tokens=number + 1,
                    complete_follows=number + 1 == count,
                )
                yield pb.GenerateResponse(chunk=chunk)
        complete = pb.GenerateComplete(
            output_ids=[self._token(number) for number in range(count)],
            finish_reason="length",
            prompt_tokens=len(request.tokenized.input_ids),
            completion_tokens=count,
            first_token_seconds=1e-3,
        )
        yield pb.GenerateResponse(complete=complete)

    async def GenerateMany(
        self, requests: AsyncIterator[pb.GenerateManyRequest], _context: Any
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        """Many such calls."""
        async with aclosing(ManyCalls(self.Generate).serve(requests)) as messages:
            async for message in messages:
                yield message

    async def GenerateWithImages(
        self, messages: AsyncIterator[pb.GenerateWithImagesRequest], context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Answers such a call, whose images are thrown away."""
        gathered = GatheredRequest()
        async for message in messages:
            gathered.take(message)
        async for response in self.Generate(gathered.finish(), context):
            yield response

    def _special(self, token: str) -> int:
        number = self._tokenizer.token_to_id(token)
        assert number is not None, token
        return number

    def _token(self, number: int) -> int:
        return self._ids[number % len(self._ids)]


async def serve(address: str, directory: Path, step_s: float) -> None:
    """Serves until standard input ends."""
    engine = ScriptedEngine(directory, step_s)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    cast(Any, engine_pb2_grpc.add_EngineServicer_to_server)(engine, server)
    health_service = health.aio.HealthServicer()
    await health_service.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    server.add_insecure_port(address)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]) / 1e3))
