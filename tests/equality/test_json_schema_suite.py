"""Guards that whatever a model would like to say, its answers satisfy the schema that was asked for.

The schemas are those of the public JSON-Schema-Test-Suite; answers are judged by the package `jsonschema`.
"""

from __future__ import annotations

import json

from llguidance import LLMatcher, LLTokenizer

from gpu_service.core.request import FinishReason, Request
from moebius.grammar.compile import grammar_of
from protos.engine_pb2 import Constraint
from tests.helpers.constraints import byte_compiler
from tests.helpers.engine_harness import make_request, prompt_of, running_engine
from tests.helpers.fake_model import FakeModel
from tests.helpers.json_schemas import suite
from tests.helpers.tiny_tokenizer import byte_level_tokenizer

VOCAB, EOS = 300, 2


def test_the_suite_is_large() -> None:
    """The suite has at least 200 schemas, of most keywords."""
    assert len(suite()) >= 200
    assert len({schema.name.partition(":")[0] for schema in suite()}) >= 40


def test_every_answer_satisfies_its_schema() -> None:
    """All schemas in one engine, on a model that draws at random, with a liking for what ends things."""
    tokenizer = byte_level_tokenizer(VOCAB)
    ends = [tokenizer.token_to_id(text) for text in '"}]'] + [EOS]
    params = {"temperature": 1.0, "logit_bias": tuple((token, 4.0) for token in sorted(ends))}
    params |= {"ignore_eos": False, "stop_token_ids": frozenset({EOS})}
    requests: list[Request] = []
    for number, schema in enumerate(suite()):
        request = make_request(f"r{number}", prompt_of(number, 5), seed=number, max_tokens=240, **params)
        (request.constraint,) = byte_compiler(VOCAB).make(Constraint(json_schema=schema.text))
        requests.append(request)
    with running_engine(
        model=FakeModel(VOCAB), overlap=True, max_num_seqs=64, budget=256, num_pages=2400, context_limit=250
    ) as harness:
        harness.run(requests)
    for request, schema in zip(requests, suite(), strict=True):
        ids = [token for token in request.output_token_ids if token != EOS]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert request.finish_reason is FinishReason.STOP, (schema.name, request.error_message, text)
        schema.check(text)


def test_no_invalid_instance_is_allowed() -> None:
    """What the suite says does not satisfy a schema cannot be an answer to it."""
    tokenizer, checked = LLTokenizer("byte"), 0
    for schema in suite():
        grammar = grammar_of(Constraint(json_schema=schema.text))
        for instance in schema.invalid:
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            data = list(json.dumps(instance, ensure_ascii=False).encode())
            is_allowed = matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
            assert not is_allowed, (schema.name, instance)
            checked += 1
    assert checked > 200
