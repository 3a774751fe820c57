"""Guards the system as clients see it: the openai client, 32 streams, disconnects; and that the death of an
expert server, which is the last test as it shows in the log, changes not a single token."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from tokenizers import Tokenizer

from app.cli import main
from moebius.network.grpc_channels import open_channel
from tests.helpers.demo import EXACT_FLAGS, MODEL, demo_checkpoint
from tests.helpers.json_schemas import SuiteSchema, suite
from tests.helpers.openai_checks import ALL_CHECKS
from tests.helpers.profiled import check_profile, check_top
from tests.helpers.stack import Stack, running_stack
from tests.helpers.waiting import wait_until
from tests.tools.screenshots import chat_picture, top_picture

pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo model on two expert servers, shared by this file's tests.

    Texts are compared for equality between a cached and a fresh prefix, so rounding must not choose.
    """
    directory = tmp_path_factory.mktemp("stack")
    with running_stack(demo_checkpoint(), directory, *EXACT_FLAGS) as running:
        yield running


def client_of(stack: Stack) -> openai.OpenAI:
    """An openai client that does not hide errors behind retries."""
    return openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
def test_openai_client(stack: Stack, check: Callable[[str, str], None]) -> None:
    """What the openai client sees of the whole system is what it sees of the gateway alone."""
    check(stack.base_url, MODEL)


def test_a_quiet_start_fits_a_screen(stack: Stack) -> None:
    """What is printed until the system is ready can be read at a glance; every process says what took how
    long, and whatever took longer is what the supervisor waited for."""
    before = stack.log.read_text().partition("\nReady: ")[0].splitlines()
    quick = [line for line in before if "waiting for" not in line and "finished: " not in line]
    assert len(quick) <= 26, "\n".join(quick)
    summaries = [line for line in before if "phases=" in line]
    assert len(summaries) == 3
    assert sum("packing experts" in line for line in summaries) == 2
    assert sum("loading dense weights" in line for line in summaries) == 1


def test_what_operators_look_with(stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While requests are computed, `moebius top` shows their experts and `moebius profile` gets one trace:
    every call of an expert server lies within one that the engine noted."""
    check_top(stack, MODEL, 30, "cpu", capsys)
    check_profile(stack, MODEL, "cpu", tmp_path, capsys)


# Without a whole system: tests/unit/app/top/test_top.py, tests/service/test_chat_terminal.py.
@pytest.mark.full
def test_pictures_of_terminals(stack: Stack, tmp_path: Path) -> None:
    """`moebius chat` and `moebius top` in a terminal of 80 columns, to their end by what is typed."""
    said = chat_picture(stack.base_url, tmp_path / "chat.svg")
    assert "> What is the capital of France?" in said
    assert "tokens/s, first after" in said
    seen = top_picture(stack.base_url, tmp_path / "top.svg")
    # Where what limits the step takes two lines, there is room for the slowest layers only.
    for part in ("limited by", "KV cache", "experts' time, ", "hand-off"):
        assert part in seen
    for name in ("chat", "top"):
        picture = (tmp_path / f"{name}.svg").read_text()
        assert ElementTree.fromstring(picture).tag.endswith("svg")
        assert "url(http" not in picture


def test_load_on_the_whole_system(stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`moebius bench serve` gets as many tokens as it asks for."""
    options = ("--num-prompts", "4", "--sharegpt-output-len", "4", "--json", str(tmp_path / "rows.json"))
    with pytest.raises(SystemExit):
        main(["bench", "serve", stack.base_url, *options])
    assert MODEL in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert (row["completed"], row["total_output_tokens"]) == (4, 16)


def test_live_figures_are_those_of_the_system(stack: Stack) -> None:
    """Every server answers with what it read, every layer has as many rows as tokens chose experts, and the
    engine's times are there: nothing of it is made up. All 16 experts are chosen, all on CPU servers."""
    client_of(stack).chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Count to ten."}], max_tokens=8
    )
    before = httpx.get(f"{stack.base_url}/v1/live").json()

    def rows(live: dict[str, Any]) -> set[int]:
        """Rows of the experts that the self-test did not look at, over all layers."""
        return {min(layer["cpu_rows"] or [0]) for layer in live["experts"]["layers"]}

    # One step may still be computed when the last token is here, and a busy server is left out once.
    end = time.monotonic() + 60
    while len(found := rows(live := httpx.get(f"{stack.base_url}/v1/live").json())) > 1 or found == {0}:
        assert time.monotonic() < end, rows(live)
        time.sleep(0.6)
    assert min(rows(live)) > 8
    assert live["time_to_first_token"]["count"] >= 1
    assert live["kv_cache"]["total_tokens"] > 0
    experts = live["experts"]
    assert (experts["num_experts"], experts["top_k"], experts["streamed"]) == (16, 16, None)
    assert [server["is_up"] for server in experts["servers"]] == [True, True]
    for server, earlier in zip(experts["servers"], before["experts"]["servers"], strict=True):
        assert server["instance"] == earlier["instance"]
        assert server["weight_bytes"] >= server["packed_bytes"] > 0
        assert server["busy_seconds"] > 0
    for layer in experts["layers"]:
        assert layer["gpu_experts"] == []
        assert layer["chosen"] is None  # the engine does not count them
    assert httpx.get(f"{stack.base_url}/").status_code == 200


def test_answer_is_coherent(stack: Stack) -> None:
    """A real question gets the real answer through template, engine, mailbox and detokeniser."""
    answer = client_of(stack).chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=60,
        temperature=0,
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 10


def test_all_apis_give_the_same_answer(stack: Stack) -> None:
    """The same question through every API has the same answer, streamed where that is the API's own way; a
    response is gone on from through the store of the whole system."""
    question = "What is the capital of France?"
    messages = [{"role": "user", "content": question}]
    settings = {"model": MODEL, "temperature": 0}
    limit = {"max_tokens": 60}
    chat = post(stack, "/v1/chat/completions", {**settings, **limit, "messages": messages})
    text = chat.json()["choices"][0]["message"]["content"]
    assert "Paris" in text
    message = post(stack, "/v1/messages", {**settings, **limit, "messages": messages}).json()
    assert message["content"] == [{"type": "text", "text": text}]
    response = client_of(stack).responses.create(
        model=MODEL, temperature=0, max_output_tokens=60, input=question
    )
    assert response.output_text == text
    options = {"temperature": 0, "num_predict": 60}
    lines = post(stack, "/api/chat", {"model": MODEL, "messages": messages, "options": options}).text
    assert "".join(json.loads(line)["message"]["content"] for line in lines.splitlines()) == text
    follow = client_of(stack).responses.create(
        model=MODEL, input="And of Spain?", previous_response_id=response.id, max_output_tokens=5
    )
    assert follow.usage is not None
    assert response.usage is not None
    assert follow.usage.input_tokens > response.usage.total_tokens
    (stored,) = stack.state_dir.rglob("responses.sqlite")
    assert stored.stat().st_mode & 0o077 == 0


def post(stack: Stack, path: str, body: dict[str, Any]) -> httpx.Response:
    """Returns one request that is answered."""
    answer = httpx.post(f"{stack.base_url}{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer


def test_stream_equals_whole(stack: Stack) -> None:
    """Concatenated stream deltas are the non-streamed text, and the second prompt hits the prefix cache."""
    client = client_of(stack)
    prompt = "The three most important things to know about growing tomatoes in a small garden are these:"
    whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=20, temperature=0)
    pieces = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(pieces)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= 16


def test_seed_repeats_and_n_differs(stack: Stack) -> None:
    """The same seed gives the same samples; the n outputs of one request are independent draws."""
    client = client_of(stack)

    def draw(seed: int) -> list[str]:
        answer = client.completions.create(
            model=MODEL, prompt="My favourite animal is", max_tokens=12, temperature=1.0, n=2, seed=seed
        )
        return [choice.text for choice in answer.choices]

    first = draw(11)
    assert first == draw(11)
    assert first[0] != first[1]
    assert first != draw(12)


def test_32_concurrent_streams_all_finish_right(stack: Stack) -> None:
    """Nothing starves or mixes at 32 streams: every stream ends with the length it asked for, none twice."""
    client = client_of(stack)

    def stream(number: int) -> tuple[int, str]:
        chunks = client.completions.create(
            model=MODEL,
            prompt=f"Number {number} is",
            max_tokens=6 + number % 5,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        text, tokens = "", 0
        for chunk in chunks:
            text += chunk.choices[0].text if chunk.choices else ""
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return tokens, text

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        results = list(pool.map(stream, range(32)))
    assert [tokens for tokens, _ in results] == [6 + number % 5 for number in range(32)]
    assert all(text for _, text in results)


def test_disconnect_frees_the_engine(stack: Stack) -> None:
    """A client that walks away stops costing anything: the engine's running count returns to zero."""
    body = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 4000,
        "stream": True,
        "ignore_eos": True,
    }
    with httpx.stream("POST", f"{stack.base_url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()  # kept: dropping the iterator would close the connection
        next(lines)
        assert running_requests(stack) == 1
    wait_until(lambda: running_requests(stack) == 0)


def running_requests(stack: Stack) -> int:
    """The engine's own count, read through its gRPC GetLoad."""

    from protos import engine_pb2, engine_pb2_grpc

    socket_path = next(Path(stack.state_dir).rglob("gpu*.sock"))
    with open_channel(f"unix:{socket_path}") as channel:
        load = engine_pb2_grpc.EngineStub(channel).GetLoad(engine_pb2.GetLoadRequest(), timeout=60)
    return int(load.num_total_reqs)


CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "is_capital": {"type": "boolean"},
    },
    "required": ["name", "population", "is_capital"],
    "additionalProperties": False,
}
ASKED: list[Any] = [{"role": "user", "content": "Describe Paris as JSON: name, population, is it a capital?"}]


def schema_format(schema: object) -> Any:
    """`response_format` with a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_answers_satisfy_a_schema(stack: Stack) -> None:
    """Whole and streamed, one output and several, with log-probabilities and without."""
    client = client_of(stack)
    settings: dict[str, Any] = {"model": MODEL, "messages": ASKED, "response_format": schema_format(CITY)}
    greedy = client.chat.completions.create(**settings, temperature=0, logprobs=True, top_logprobs=2)
    text = greedy.choices[0].message.content or ""
    jsonschema.validate(json.loads(text), CITY)
    assert greedy.choices[0].finish_reason == "stop"
    assert greedy.usage is not None
    logprobs = greedy.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.content or ()) == greedy.usage.completion_tokens
    pieces = client.chat.completions.create(**settings, temperature=0, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    several = client.chat.completions.create(**settings, temperature=1, n=2, seed=5)
    for choice in several.choices:
        jsonschema.validate(json.loads(choice.message.content or ""), CITY)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_choice": ["Paris", "London"]}, "Paris|London"),
        ({"structured_outputs": {"regex": "[A-Z][a-z]{2,9} in 19[0-9]{2}"}}, "[A-Z][a-z]{2,9} in 19[0-9]{2}"),
        ({"guided_grammar": 'root ::= "yes, " ("I" | "we") " do"'}, "yes, (I|we) do"),
    ],
    ids=["choice", "regex", "grammar"],
)
def test_answers_have_the_form_that_was_asked_for(stack: Stack, extra: dict[str, Any], pattern: str) -> None:
    """Also together with requests that ask for none, whose answers are what they are alone."""
    client = client_of(stack)

    def ask(body: dict[str, Any]) -> str:
        answer = client.chat.completions.create(
            model=MODEL, messages=ASKED, max_tokens=16, temperature=0, extra_body=body
        )
        return answer.choices[0].message.content or ""

    alone = ask({})
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, [extra, {}] * 2))
    assert set(answers[1::2]) == {alone}
    assert all(re.fullmatch(pattern, answer) for answer in answers[::2]), answers


def test_schemas_that_can_not_be_enforced_are_refused(stack: Stack) -> None:
    """A 400 that names parameter and keyword; the next request is answered."""
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        client_of(stack).chat.completions.create(
            model=MODEL, messages=ASKED, response_format=schema_format(schema)
        )
    assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_answers_satisfy_the_schemas_of_the_public_suite(stack: Stack) -> None:
    """All of them on the demo model, 32 at once; an answer that is cut off is too long, never wrong."""
    client = client_of(stack).with_options(timeout=600)
    # The model is small and does not come to an end by itself.
    ends = Tokenizer.from_file(str(demo_checkpoint() / "tokenizer.json"))
    bias = {str(ends.token_to_id(text)): 12 for text in ('"', "}", "]", '"}', '"]', "<|im_end|>")}

    def ask(schema: SuiteSchema) -> str:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Answer as shortly as you can, with JSON like 1 or []."}],
            max_tokens=48,
            temperature=0,
            logit_bias=bias,
            extra_body={"guided_json": schema.text},
        )
        choice = answer.choices[0]
        return choice.message.content or "" if choice.finish_reason == "stop" else ""

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, suite()))
    whole = [(schema, answer) for schema, answer in zip(suite(), answers, strict=True) if answer]
    for schema, answer in whole:
        schema.check(answer)
    assert len(whole) > 190


def complete(stack: Stack, prompt: str, max_tokens: int = 40) -> str:
    """Returns greedy text of one completion."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{stack.base_url}/v1/completions", json=body, timeout=280)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_accepted_tokens_are_those_that_are_generated_anyway(stack: Stack, tmp_path: Path) -> None:
    """`--speculative-method ngram`: texts that repeat themselves come several tokens at a time, in order, and
    are those of the system without; metrics say how many draft tokens were accepted."""
    prompts = ["one two three four one two three four one two three four", "The lighthouse began when"]
    flags = ("--speculative-method", "ngram", "--no-adaptive-drafts")
    with running_stack(demo_checkpoint(), tmp_path, *EXACT_FLAGS, *flags) as speculative:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            texts = [list(pool.map(lambda p, s=one: complete(s, p), prompts)) for one in (stack, speculative)]
        assert texts[0] == texts[1]
        pieces = client_of(speculative).completions.create(
            model=MODEL,
            prompt=prompts[0],
            max_tokens=36,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = list(pieces)
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        assert texts[0][0].startswith(text)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 36
        page = httpx.get(f"{speculative.metrics_url}/metrics").text
        counts = {
            name: float(re.findall(rf"^vllm:spec_decode_num_{name}_total.* (\S+)$", page, re.M)[0])
            for name in ("draft_tokens", "accepted_tokens")
        }
        assert counts["draft_tokens"] > counts["accepted_tokens"] > 20, counts


def test_expert_server_killed_while_decoding(stack: Stack) -> None:
    """SIGKILL of one server mid-decode: it is restarted and every request ends with the same tokens."""
    prompts = [f"Chapter {number}. The history of the lighthouse began when" for number in range(2)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        expected = list(pool.map(lambda prompt: complete(stack, prompt), prompts))
        httpx.get(f"{stack.base_url}/health").raise_for_status()
        futures = [pool.submit(complete, stack, prompt) for prompt in prompts]
        wait_until(lambda: running_requests(stack) == len(prompts))
        victim = stack.children("expert")[0]
        assert not all(future.done() for future in futures), "the kill must hit running requests"
        os.kill(victim.pid, signal.SIGKILL)
        answers = [future.result(timeout=280) for future in futures]
    assert answers == expected
    assert victim.pid not in [child.pid for child in stack.children("expert")]
    assert len(stack.children("expert")) == 2
    # What it had packed was still there. Its lines come through a pipe and a thread of another process.
    wait_until(lambda: stack.log.read_text().count("experts loaded") == 3)
    assert stack.log.read_text().count("packed experts are there already") == 1
