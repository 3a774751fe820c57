"""Guards the batches of `moebius serve`, for which no setting names a directory."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import openai
import pytest

from tests.drills.checkpoint import FLAGS, write_checkpoint
from tests.helpers.stack import Stack, running_stack

COUNT = 150


def client_of(stack: Stack) -> openai.OpenAI:
    """A client that shows errors instead of retrying."""
    return openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0, timeout=60)


def lines(model: str) -> bytes:
    """An input file."""
    body = {"model": model, "prompt": "x", "max_tokens": 40}
    return b"".join(
        json.dumps(
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        ).encode()
        + b"\n"
        for number in range(COUNT)
    )


# A kill and a restart of the gateway alone are in test_gateway_batches_killed.py.
@pytest.mark.full
def test_a_restart_goes_on_with_a_batch(tmp_path: Path) -> None:
    """What a stopped server has not answered, its successor on another port does, and each line once; before
    the first file nothing is in the user's state."""
    model = write_checkpoint(tmp_path / "model")
    flags = [*FLAGS, "--expert-servers", "1", "--batch-requests", "1"]
    with running_stack(model, tmp_path, *flags) as stack:
        client = client_of(stack)
        name = client.models.list().data[0].id
        assert not (tmp_path / "user-state").exists()
        file = client.files.create(file=("lines.jsonl", lines(name)), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        end = time.monotonic() + 60
        (results,) = (tmp_path / "user-state").rglob(batch.id)
        while not (output := results / "output.jsonl").exists() or not output.stat().st_size:
            assert time.monotonic() < end
            time.sleep(0.01)
    before = output.read_bytes().count(b"\n")
    assert 0 < before < COUNT
    with running_stack(model, tmp_path, *flags) as stack:
        client, end = client_of(stack), time.monotonic() + 120
        while (batch := client.batches.retrieve(batch.id)).status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing"), batch
            assert time.monotonic() < end
            time.sleep(0.1)
        assert batch.output_file_id is not None
        answers = client.files.content(batch.output_file_id).text.splitlines()
    assert Counter(json.loads(one)["custom_id"] for one in answers) == Counter(map(str, range(COUNT)))
