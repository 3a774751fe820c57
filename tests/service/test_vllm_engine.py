"""Guards the contract of vLLM's engines: the same answers as our own, by the published names and numbers."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer, models, pre_tokenizers

from gpu_service.server.vllm_engine import SERVICE_NAME, convert_constraint
from moebius import __version__
from moebius.models.identity import identity_text, model_parts
from protos import engine_pb2, smg_common_pb2, vllm_engine_pb2_grpc
from protos import vllm_engine_pb2 as pb
from tests.helpers.engine_harness import prompt_of
from tests.helpers.fake_model import VOCAB
from tests.helpers.swapped_files import swap_tokens
from tests.helpers.waiting import until
from tests.service.test_engine_grpc import Served, idle, message, served

# Of the published file, by hand: what a router's stubs have compiled in.
PUBLISHED = {
    "SamplingParams": {
        "temperature": 1,
        "top_p": 2,
        "top_k": 3,
        "min_p": 4,
        "frequency_penalty": 5,
        "presence_penalty": 6,
        "repetition_penalty": 7,
        "max_tokens": 8,
        "min_tokens": 9,
        "stop": 10,
        "stop_token_ids": 11,
        "skip_special_tokens": 12,
        "spaces_between_special_tokens": 13,
        "ignore_eos": 14,
        "n": 15,
        "json_schema": 16,
        "regex": 17,
        "grammar": 18,
        "structural_tag": 19,
        "json_object": 20,
        "choice": 21,
        "logprobs": 22,
        "prompt_logprobs": 23,
        "seed": 24,
        "include_stop_str_in_output": 25,
        "logit_bias": 26,
        "truncate_prompt_tokens": 27,
        "grammar_from_first_token": 28,
    },
    "GenerateRequest": {
        "request_id": 1,
        "tokenized": 2,
        "text": 3,
        "sampling_params": 4,
        "stream": 5,
        "mm_inputs": 7,
        "kv_transfer_params_json": 8,
        "data_parallel_rank": 9,
        "media_refs": 10,
        "extra_mm_inputs": 11,
    },
    "GenerateStreamChunk": {
        "token_ids": 1,
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 4,
        "output_logprobs": 5,
        "input_logprobs": 6,
        "index": 7,
    },
    "GenerateComplete": {
        "output_ids": 1,
        "finish_reason": 2,
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 5,
        "output_logprobs": 6,
        "input_logprobs": 7,
        "index": 8,
        "matched_token_id": 10,
        "matched_stop_str": 11,
    },
    "SchedulerLoad": {
        "dp_rank": 1,
        "num_running_reqs": 2,
        "num_waiting_reqs": 3,
        "num_total_reqs": 4,
        "num_used_tokens": 5,
        "max_total_num_tokens": 6,
        "token_usage": 7,
        "gen_throughput": 8,
        "cache_hit_rate": 9,
        "utilization": 10,
        "max_running_requests": 11,
    },
    "GetServerInfoResponse": {
        "active_requests": 1,
        "is_paused": 2,
        "last_receive_timestamp": 3,
        "uptime_seconds": 4,
        "server_type": 5,
        "data_parallel_size": 9,
        "block_size": 12,
        "max_num_seqs": 20,
        "constrained_decoding_start": 24,
    },
}


def word_tokenizer() -> Tokenizer:
    """Token i is the word `wi`; texts are words with a space between."""
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


@asynccontextmanager
async def router(directory: Path) -> AsyncIterator[tuple[vllm_engine_pb2_grpc.VllmEngineStub, Served]]:
    """A stub of the published contract, of an engine whose tokenizer is in `directory`."""
    word_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text("{}")
    async with served() as service:
        assert service.servicer.service is not None
        info = service.servicer.service.info
        info.tokenizer_path, info.max_req_input_len, info.supports_vision = str(directory), 127, True
        stub = vllm_engine_pb2_grpc.VllmEngineStub(service.channel)  # type: ignore[no-untyped-call]
        yield stub, service


def request(request_id: str = "r", stream: bool = True, **sampling: object) -> pb.GenerateRequest:
    """Returns the twin of `message`."""
    defaults: dict[str, object] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt_of(1, 10)),
        sampling_params=pb.SamplingParams(**(defaults | sampling)),  # type: ignore[arg-type]
        stream=stream,
    )


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_names_and_numbers_are_the_published_ones(name: str) -> None:
    """A router's stubs were compiled from the published file; another number would be another field."""
    fields = pb.DESCRIPTOR.message_types_by_name[name].fields
    assert {field.name: field.number for field in fields} == PUBLISHED[name]
    assert SERVICE_NAME == "vllm.grpc.engine.VllmEngine"


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_are_those_of_our_own_contract(tmp_path: Path, stream: bool) -> None:
    """Token for token, log-probabilities, counts and ends; of n outputs each has one last message."""
    asked: dict[str, object] = {"n": 2, "logprobs": 2, "prompt_logprobs": 1, "seed": 5, "temperature": 1.0}
    asked |= {"logit_bias": {3: -100.0}, "stop_token_ids": [7], "min_p": 0.01, "top_k": 20}
    async with router(tmp_path) as (stub, service):
        theirs = [r async for r in stub.Generate(request("a", stream, **asked))]
        ours = [r async for r in service.stub.Generate(message("b", stream, **asked))]
    theirs_last = {r.complete.index: r.complete for r in theirs if r.HasField("complete")}
    ours_last = {r.complete.index: r.complete for r in ours if r.HasField("complete")}
    for own in ours_last.values():
        own.ClearField("first_token_seconds")
    assert theirs_last.keys() == ours_last.keys() == {0, 1}
    for index, own in ours_last.items():
        theirs_last[index].cached_tokens = own.cached_tokens  # the prompt was cached for the second call
        assert theirs_last[index].SerializeToString() == own.SerializeToString()
    chunks = [r.chunk for r in theirs if r.HasField("chunk")]
    assert bool(chunks) == stream
    for index, last in theirs_last.items() if stream else ():
        assert [t for c in chunks if c.index == index for t in c.token_ids] == list(last.output_ids)


@pytest.mark.parametrize("stream", [True, False])
async def test_stop_strings_end_outputs(tmp_path: Path, stream: bool) -> None:
    """Outputs end at the token that completes the text, also where it goes over several; nothing is computed
    after it.
    """
    async with router(tmp_path) as (stub, service):
        (plain,) = [r async for r in stub.Generate(request("a", False))]
        ids = list(plain.complete.output_ids)
        stop = f"{ids[3]} w{ids[4]}"  # from the middle of a word to the next
        answers = [
            r
            async for r in stub.Generate(
                request("b", stream, max_tokens=100, logprobs=1, stop=["nowhere", stop])
            )
        ]
        last = answers[-1].complete
        assert (last.finish_reason, last.matched_stop_str, list(last.output_ids)) == ("stop", stop, ids[:5])
        assert last.completion_tokens == 5
        if stream:
            assert [t for r in answers[:-1] for t in r.chunk.token_ids] == ids[:5]
            assert len(answers[-2].chunk.output_logprobs.token_logprobs) == len(answers[-2].chunk.token_ids)
        else:
            assert len(last.output_logprobs.token_logprobs) == 5
        await idle(service.harness)
        later = [r async for r in stub.Generate(request("c", stream, stop=[stop], min_tokens=8))]
        assert later[-1].complete.finish_reason == "length"


async def test_texts_are_tokenised_and_cut_off(tmp_path: Path) -> None:
    """A prompt as text is the same request as its ids; `truncate_prompt_tokens` keeps its end."""
    async with router(tmp_path) as (stub, _):
        text = request("a", False)
        text.text = " ".join(f"w{token}" for token in prompt_of(1, 10))
        (by_text,) = [r async for r in stub.Generate(text)]
        (by_ids,) = [r async for r in stub.Generate(request("b", False))]
        assert by_text.complete.output_ids == by_ids.complete.output_ids
        (cut,) = [r async for r in stub.Generate(request("c", False, truncate_prompt_tokens=4))]
        assert cut.complete.prompt_tokens == 4


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (pb.GenerateRequest(mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
        (pb.GenerateRequest(media_refs=pb.MediaRefs()), "media_refs"),
        (pb.GenerateRequest(kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (pb.GenerateRequest(data_parallel_rank=1), "data_parallel_rank"),
        (pb.GenerateRequest(sampling_params=pb.SamplingParams(truncate_prompt_tokens=0)), "truncate_prompt"),
        (pb.GenerateRequest(sampling_params=pb.SamplingParams(stop=[""])), "sampling_params.stop"),
        (pb.GenerateRequest(sampling_params=pb.SamplingParams(logprobs=-1)), "sampling_params.logprobs"),
    ],
)
async def test_what_is_not_taken_is_named(tmp_path: Path, change: pb.GenerateRequest, field: str) -> None:
    """INVALID_ARGUMENT, like all refusals of our own contract."""
    asked = request()
    asked.MergeFrom(change)
    async with router(tmp_path) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(asked).read()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert field in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("kind", "value", "ours"),
    [
        ("json_schema", "{}", engine_pb2.Constraint(json_schema="{}")),
        ("regex", "a+", engine_pb2.Constraint(regex="a+")),
        ("grammar", 'root ::= "a"', engine_pb2.Constraint(ebnf='root ::= "a"')),
        ("structural_tag", "{}", engine_pb2.Constraint(structural_tag="{}")),
        ("json_object", True, engine_pb2.Constraint(json_object=True)),
        (
            "choice",
            pb.ChoiceConstraint(choices=["a", "b"]),
            engine_pb2.Constraint(choice=engine_pb2.Choice(options=["a", "b"])),
        ),
    ],
)
def test_constraints_are_ours(kind: str, value: object, ours: engine_pb2.Constraint) -> None:
    """Each kind of the published contract has its counterpart; none of them is dropped."""
    converted = engine_pb2.GenerateRequest()
    convert_constraint(pb.SamplingParams(**{kind: value}), converted)  # type: ignore[arg-type]
    assert converted.constraint == ours
    kinds = pb.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"].fields
    assert kind in {field.name for field in kinds}
    assert len(kinds) == 6


async def test_a_dropped_or_aborted_call_is_computed_no_further(tmp_path: Path) -> None:
    """Routers cancel the call, or send Abort, when their client leaves."""
    async with router(tmp_path) as (stub, service):
        for by_abort in (False, True):
            call = stub.Generate(request(f"long{by_abort}", max_tokens=100))
            assert (await call.read()).chunk.token_ids
            if by_abort:
                await stub.Abort(pb.AbortRequest(request_ids=["longTrue", "nobody"]))
                while not (last := await call.read()).HasField("complete"):
                    pass
                assert last.complete.finish_reason == "abort"
            else:
                call.cancel()
            await idle(service.harness)


async def test_facts_loads_and_health(tmp_path: Path) -> None:
    """What routers ask when they register an engine, and go on asking."""
    async with router(tmp_path) as (stub, service):
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.vocab_size, info.served_model_name, info.supports_vision) == (VOCAB, "fake", False)
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        health = health_pb2_grpc.HealthStub(service.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        service.harness.model.gate.clear()
        call = stub.Generate(request("x", max_tokens=100))
        await until(lambda: service.servicer.running == 1)
        server = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.active_requests, server.server_type, server.data_parallel_size) == (1, "vllm-grpc", 1)
        assert server.last_receive_timestamp > 0
        service.harness.model.gate.set()
        assert (await call.read()).chunk.token_ids
        call.cancel()
        await idle(service.harness)
        loads = await stub.GetLoads(pb.GetLoadsRequest())
        own = await service.stub.GetLoad(engine_pb2.GetLoadRequest())
        assert (loads.version, loads.dp_rank_count, len(loads.loads)) == (__version__, 1, 1)
        assert loads.loads[0].max_total_num_tokens == own.max_total_num_tokens > 0
        assert not (await stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads
        assert (await stub.FlushCache(smg_common_pb2.FlushCacheRequest())).success
        service.servicer.problem = lambda: "steps wait for lost expert servers"
        ill = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (ill.healthy, ill.message) == (False, "steps wait for lost expert servers")
        service.servicer.service = None
        assert (await stub.HealthCheck(pb.HealthCheckRequest())).message == "the model is still loading"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_the_tokenizer_comes_as_an_archive(tmp_path: Path) -> None:
    """Its files as they are, the hash with the last piece; the same bytes every time."""
    async with router(tmp_path) as (stub, _):
        archives = []
        for _ in range(2):
            chunks = [c async for c in stub.GetTokenizer(smg_common_pb2.GetTokenizerRequest())]
            archives.append(b"".join(chunk.data for chunk in chunks))
            assert chunks[-1].sha256 == hashlib.sha256(archives[-1]).hexdigest()
            assert all(not chunk.sha256 for chunk in chunks[:-1])
        assert archives[0] == archives[1]
        with zipfile.ZipFile(io.BytesIO(archives[0])) as archive:
            assert set(archive.namelist()) == {"tokenizer.json", "config.json"}
            assert archive.read("tokenizer.json") == (tmp_path / "tokenizer.json").read_bytes()
        (tmp_path / "tokenizer.json").unlink()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetTokenizer(smg_common_pb2.GetTokenizerRequest()).read()
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_router_gets_no_other_tokenizer(tmp_path: Path) -> None:
    """A router gets the engine's tokenizer: one that was replaced meanwhile would make prompts of other
    tokens.
    """
    async with router(tmp_path) as (stub, service):
        assert service.servicer.service is not None
        service.servicer.service.info.identity = identity_text(model_parts(tmp_path))
        swap_tokens(tmp_path / "tokenizer.json")
        with pytest.raises(grpc.aio.AioRpcError, match=r"tokenizer\.json has changed since") as caught:
            await stub.GetTokenizer(smg_common_pb2.GetTokenizerRequest()).read()
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        request = pb.GenerateRequest(request_id="r", text="hello")
        with pytest.raises(grpc.aio.AioRpcError, match=r"tokenizer\.json has changed since"):
            await stub.Generate(request).read()


async def test_what_is_not_served_is_unimplemented(tmp_path: Path) -> None:
    """Embeddings and events of the cache: routers go on without."""
    async with router(tmp_path) as (stub, _):
        for call in (
            stub.Embed(pb.EmbedRequest()),
            stub.SubscribeKvEvents(smg_common_pb2.SubscribeKvEventsRequest()).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
