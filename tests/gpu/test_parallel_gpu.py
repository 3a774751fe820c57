"""Guards ranks on GPUs: NCCL inside graphs, two GPUs equal one, and a lost rank that hangs no GPU.

The same engine as in `tests/equality/test_parallel_ranks.py`, with every expert on the GPUs or served over
doorbells, so that decode steps are captured whole.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from app.supervisor.supervisor import Supervisor
from moebius.config.division import SmallAllReduce
from moebius.errors import PEER_LOST_EXIT
from tests.helpers.engine_outputs import WAIT_S
from tests.helpers.family_answers import errors
from tests.helpers.ports import free_port
from tests.helpers.rank_faults import started_group
from tests.helpers.rank_group import CONTEXT, Outcome, rank_config, run_group
from tests.helpers.rank_models import MODELS
from tests.helpers.rank_serving import generate, planned, watch
from tests.helpers.tiny_models import TinyModel, choosing_at_most, write_tiny_model
from tests.tolerances import (
    FAMILY_BFLOAT16_RANKS_MEDIAN,
    LOGPROBS_FLOAT32_RANKS_GPU,
)

pytestmark = pytest.mark.multigpu
ROOT = Path(__file__).resolve().parents[2]
# Sizes that every library's kernels take, also when halved.
MODEL = TinyModel(
    "qwen3_moe",
    {
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
)
ON_GPUS: dict[str, Any] = {"device": "cuda", "gpu_experts_ratio": 1.0, "num_pages": 128, "page_size": 16}
Cases = dict[str, list[Outcome]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny float32 checkpoint."""
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(MODEL, directory, seed=21)
    return directory


@pytest.fixture(scope="module")
def one_gpu(model: Path) -> Callable[[str], Cases]:
    """Returns what one GPU says, by dtype."""

    @cache
    def run(dtype: str) -> Cases:
        return run_group(in_dtype(model, dtype, 1, 1))

    return run


def in_dtype(model: Path, dtype: str, tp: int, pp: int, **changes: Any) -> Any:
    """Settings; float32 has Triton's attention, since FlashInfer computes in 16 bits only."""
    backend = {"attention_backend": "triton" if dtype == "float32" else "auto"}
    config = rank_config(model, tp, pp, **(ON_GPUS | backend | changes))
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})


def scores(found: Cases, expected: Cases) -> tuple[list[list[float]], list[list[float]]]:
    """Log-probabilities of all prompt tokens, and of the outputs as long as those are the same; of both."""
    pairs: tuple[list[list[float]], list[list[float]]] = [], []
    for ours, theirs in zip(found["scored"], expected["scored"], strict=True):
        tokens = zip(ours.token_ids, theirs.token_ids, strict=True)
        same = next((n for n, pair in enumerate(tokens) if len({*pair}) > 1), len(theirs.token_ids))
        for kept, outcome in zip(pairs, (ours, theirs), strict=True):
            # The first token of a prompt has none.
            known = [*outcome.prompt_logprobs[1:], *outcome.logprobs[:same]]
            kept.append([value for value in known if value is not None])
    return pairs


def assert_close(found: Cases, expected: Cases, tolerance: float) -> None:
    """Every score."""
    for index, (ours, theirs) in enumerate(zip(*scores(found, expected), strict=True)):
        assert ours == pytest.approx(theirs, abs=tolerance), index


def assert_close_in_the_median(found: Cases, expected: Cases) -> None:
    """In bfloat16, where one rounding may turn a tiny random router to another expert; prints the errors."""
    report = errors(*scores(found, expected))
    print(report)
    assert report.median <= FAMILY_BFLOAT16_RANKS_MEDIAN, str(report)


def assert_same_tokens(found: Cases, expected: Cases) -> None:
    """Compares the tokens of all cases, and as much of each prompt found in the cache."""
    # A first stage without routed experts has nothing to record.
    assert expected.keys() - found.keys() <= {"recorded"}
    for case, outcomes in ((case, expected[case]) for case in found):
        assert [o.token_ids for o in found[case]] == [o.token_ids for o in outcomes], case
        assert [o.cached_len for o in found[case]] == [o.cached_len for o in outcomes], case


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_two_gpus_equal_one_in_float32(
    model: Path, one_gpu: Callable[[str], Cases], tp: int, pp: int, graphs: bool
) -> None:
    """Every case gives the same tokens, captured or not."""
    expected = one_gpu("float32")
    found = run_group(in_dtype(model, "float32", tp, pp, cuda_graphs=graphs))
    assert_close(found, expected, LOGPROBS_FLOAT32_RANKS_GPU)
    assert_same_tokens(found, expected)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_two_gpus_are_close_to_one_in_bfloat16(
    model: Path, one_gpu: Callable[[str], Cases], tp: int, pp: int
) -> None:
    """With the best backend there is; sums over ranks round in another order."""
    assert_close_in_the_median(run_group(in_dtype(model, "bfloat16", tp, pp)), one_gpu("bfloat16"))


FAMILIES = pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        ("latent", 2, 1),
        ("latent_choosing", 2, 1),
        ("latent_choosing", 1, 2),
        ("linear_mixed_projections", 2, 1),
    ],
)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Cases]]:
    """Returns a tiny model by name, and what one GPU says in a dtype."""

    @cache
    def make(name: str, dtype: str) -> tuple[Path, Cases]:
        directory = tmp_path_factory.mktemp(name)
        # In 16 bits a choice may turn with one rounding: all tokens that are scored are attended to.
        tiny = MODELS[name] if dtype == "float32" else choosing_at_most(MODELS[name], 64)
        write_tiny_model(tiny, directory, seed=11)
        return directory, run_group(in_dtype(directory, dtype, 1, 1))

    return make


@FAMILIES
def test_families_on_two_gpus_equal_one_in_float32(
    family: Callable[[str, str], tuple[Path, Cases]], name: str, tp: int, pp: int
) -> None:
    """Latents on every rank and heads on one; choices that all make alike; states of linear attention."""
    directory, expected = family(name, "float32")
    found = run_group(in_dtype(directory, "float32", tp, pp))
    assert_close(found, expected, LOGPROBS_FLOAT32_RANKS_GPU)
    assert_same_tokens(found, expected)


@FAMILIES
def test_families_on_two_gpus_are_close_to_one_in_bfloat16(
    family: Callable[[str, str], tuple[Path, Cases]], name: str, tp: int, pp: int
) -> None:
    """The median is close: tiny random routers turn to other experts at one rounding."""
    directory, expected = family(name, "bfloat16")
    assert_close_in_the_median(run_group(in_dtype(directory, "bfloat16", tp, pp)), expected)


def _collectives(
    rank: int, store_port: int, small: SmallAllReduce, results: multiprocessing.connection.Connection
) -> None:
    """One of two ranks: captures all collectives once, replays them on other values."""
    from torch._C._distributed_c10d import TCPStore

    from gpu_service.core.parallel import ParallelContext
    from gpu_service.parallel.group import make_process_groups

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", store_port, 2, rank == 0, timedelta(seconds=30))
    context, _ = make_process_groups(ParallelContext(tp_rank=rank, tp_size=2), store, device, 30.0, small)
    group = context.world_group
    summed, own = torch.zeros(3, 8, device=device), torch.zeros(3, 4, device=device)
    sent, passed = torch.zeros(5, device=device), torch.zeros(6, device=device)
    gathered = torch.zeros(3, 8, device=device)

    def step() -> None:
        context.tensor_group.all_reduce(summed)
        gathered.copy_(group.all_gather(own))
        group.broadcast(sent, 1)
        if rank == 0:
            group.send(passed, 1)
        else:
            group.receive(passed, 0)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
        seen = []
        for value in (1.0, 10.0):
            for tensor in (summed, own, sent, passed):
                tensor.fill_(value * (rank + 1))
            graph.replay()
            stream.synchronize()
            seen.append([t.flatten()[[0, -1]].tolist() for t in (summed, gathered, sent, passed)])
    graph.reset()
    torch.distributed.destroy_process_group()
    results.send((rank, seen))


@pytest.mark.parametrize("small", ["nccl", "one-shot", "auto"])
def test_collectives_are_captured_in_graphs(small: SmallAllReduce) -> None:
    """All-reduce, all-gather, broadcast and send replay on new values, on both ranks alike."""
    store_port = free_port()
    receiving, sending = CONTEXT.Pipe(duplex=False)
    ranks = [CONTEXT.Process(target=_collectives, args=(rank, store_port, small, sending)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        seen = {}
        for _ in ranks:
            assert receiving.poll(WAIT_S), "a rank did not answer"
            rank, values = receiving.recv()
            seen[rank] = values
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    expected = [[[3 * v, 3 * v], [v, 2 * v], [2 * v, 2 * v], [v, v]] for v in (1.0, 10.0)]
    assert seen == {0: expected, 1: expected}


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_rank_hangs_no_gpu(model: Path, tmp_path: Path, lost: int) -> None:
    """The other rank's GPU waits inside NCCL; its process ends all the same, and says why."""
    with started_group(model, tmp_path, tp=2, pp=1, timeout_s=30, **ON_GPUS) as group:
        group.kill(lost, signal.SIGKILL)
        assert group.exit_codes(but=lost) == [PEER_LOST_EXIT]
        assert f"rank {lost}" in group.log(1 - lost)


def test_two_gpus_share_expert_servers(model: Path, tmp_path: Path) -> None:
    """All routed experts on one expert server, rung from inside both GPUs' graphs; killed once on the way."""
    said = []
    for ranks in (1, 2):
        settings = {"device": "cuda", "attention_backend": "triton", "page_size": "16"}
        serve = planned(model, tmp_path / f"s{ranks}", ranks, **settings)
        with Supervisor(serve.plan, serve.timing) as supervisor, ThreadPoolExecutor(1) as pool:
            assert supervisor.wait_ready()
            said.append(generate(serve.config.gpu.gpu_address))
            delayed = pool.submit(generate, serve.config.gpu.gpu_address)
            time.sleep(0.05)
            expert = next(p for p in supervisor.processes if p.spec.name == "expert-0")
            os.kill(expert.pid or 0, signal.SIGKILL)
            watch(supervisor, delayed.done)
            said.append(delayed.result())
            assert [p.restarts for p in supervisor.processes if p is not expert] == [0] * ranks
    assert said == [said[0]] * 4


@pytest.mark.parametrize("ratio", ["1.0", "0.0"], ids=["gpu-experts", "cpu-experts"])
@pytest.mark.parametrize(("tp", "small"), [(1, "nccl"), (2, "nccl"), (2, "one-shot")])
def test_the_benchmark_runs_on_ranks(model: Path, tmp_path: Path, tp: int, small: str, ratio: str) -> None:
    """Decode and prefill are measured through the same command as on one GPU."""
    results = tmp_path / "bench.json"
    command = [sys.executable, "-m", "moebius", "bench", "engine", str(model), "--device", "cuda"]
    command += ["--tensor-parallel-size", str(tp), "--small-all-reduce", small]
    command += ["--gpu-experts-ratio", ratio, "--dtype", "bfloat16"]
    command += ["--streams", "1,4", "--prefill", "128", "--max-tokens", "32", "--json", str(results)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)
    assert json.loads(results.read_text())
