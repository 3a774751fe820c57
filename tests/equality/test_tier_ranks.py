"""Guards prefixes in RAM and on disk of several ranks: each has its part of a block, all find the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from gpu_service.cache.tiers.disk_file import INDEX_SUFFIX, SUFFIX
from tests.helpers.rank_group import Outcome, Script, rank_config, run_group
from tests.helpers.rank_models import MODELS
from tests.helpers.tiny_models import write_tiny_model
from tests.helpers.waiting import wait_until

PROMPTS, LENGTH, PAGE_SIZE = 6, 40, 4
# All whole pages of a prompt that leave a token to compute.
CACHED = (LENGTH - 1) // PAGE_SIZE * PAGE_SIZE


def turns(script: Script) -> dict[str, list[Outcome]]:
    """Returns the outputs of prompts one after another, again, and twice all together; and hits."""
    built, size = script.built, script.vocab_size - 3
    prompts = [[(i * 37 + k * k * 5 + k) % size + 3 for k in range(LENGTH)] for i in range(PROMPTS)]
    assert built.tiers is not None
    # Kept by the time of rank 0, which all ranks have.
    kept = script.make("kept", prompts[0], max_tokens=4, ignore_eos=True)
    kept.keep_prefix_s = 60.0
    built.engine.submit([kept])
    found = {"kept": script.outcomes([kept])}
    for turn in ("computed", "again"):
        found[turn] = [
            script.outcomes([script.submit(f"{turn}{i}", prompt, max_tokens=4, ignore_eos=True)])[0]
            for i, prompt in enumerate(prompts)
        ]
        found[f"hits {turn}"] = [Outcome([built.tiers.hit_tokens["ram"]], "", 0)]
    together = [
        script.make(f"together{i}", prompt, max_tokens=4, ignore_eos=True)
        for i, prompt in enumerate([*prompts, *prompts])
    ]
    built.engine.submit(together)
    found["together"] = script.outcomes(together)
    assert built.engine.flush().result(60) > 0
    found["flushed"] = [script.outcomes([script.submit("flushed", prompts[0], max_tokens=4)])[0]]
    return found


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [
        # Stages of different layers: their blocks differ in size, one stage may have no states.
        ("latent_and_linear", 2, 2),
        pytest.param("qwen3_bias_tied", 2, 1, marks=pytest.mark.full),
        pytest.param("short_convolutions", 1, 2, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.full)])
def test_prefixes_come_back_from_the_ram_of_each_rank(
    name: str, tp: int, pp: int, overlap: bool, tmp_path: Path
) -> None:
    """The pool holds two prompts: all others come back from RAM, with equal outputs, however they arrive."""
    write_tiny_model(MODELS[name], tmp_path, seed=11)
    config = rank_config(
        tmp_path, tp, pp, num_pages=32, max_num_seqs=4, kv_offload_gib=0.05, overlap_scheduling=overlap
    )
    found = run_group(config, cases=turns)
    tokens = [outcome.token_ids for outcome in found["computed"]]
    assert len({tuple(one) for one in tokens}) > 1
    assert [outcome.token_ids for outcome in found["again"]] == tokens
    assert [outcome.token_ids for outcome in found["together"]] == tokens + tokens
    assert found["kept"][0].token_ids == tokens[0]
    assert [outcome.cached_len for outcome in found["computed"]] == [CACHED] + [0] * (PROMPTS - 1)
    assert [outcome.cached_len for outcome in found["again"]] == [CACHED] * PROMPTS
    assert found["hits computed"][0].token_ids == [0]
    assert found["hits again"][0].token_ids[0] >= (PROMPTS - 2) * CACHED
    assert found["flushed"][0].cached_len == 0


def one_by_one(written: Path | None, script: Script) -> dict[str, list[Outcome]]:
    """Returns the outputs of prompts one after another, and how many tokens came from the disk.

    `written`: where both ranks have to have written what they computed, first.
    """
    tiers, size = script.built.tiers, script.vocab_size - 3
    assert tiers is not None
    prompts = [[(i * 37 + k * k * 5 + k) % size + 3 for k in range(LENGTH)] for i in range(PROMPTS)]
    outputs = [
        script.outcomes([script.submit(f"r{i}", prompt, max_tokens=4, ignore_eos=True)])[0]
        for i, prompt in enumerate(prompts)
    ]
    if written is not None:
        wait_until(
            lambda: (
                tiers.is_copied
                and len({path.stat().st_size for path in written.glob(f"*{INDEX_SUFFIX}")}) == 1
            )
        )
    return {"outputs": outputs, "from disk": [Outcome([tiers.hit_tokens["disk"]], "", 0)]}


@pytest.mark.parametrize("ram_gib", [0.05, pytest.param(0.0, marks=pytest.mark.full)])
def test_prefixes_on_disk_survive_a_kill_of_all_ranks(ram_gib: float, tmp_path: Path) -> None:
    """Fresh ranks find what killed ones had written; where one rank's part is damaged, all compute it, and
    outputs are equal."""
    model, disk = tmp_path / "model", tmp_path / "disk"
    model.mkdir()
    write_tiny_model(MODELS["latent_and_linear"], model, seed=11)

    def run(is_killed: bool) -> dict[str, list[Outcome]]:
        config = rank_config(
            *(model, 2, 1),
            num_pages=32,
            max_num_seqs=4,
            kv_offload_gib=ram_gib,
            kv_disk_gib=0.05,
            kv_disk_dir=str(disk),
        )
        return run_group(config, cases=partial(one_by_one, disk if is_killed else None), is_killed=is_killed)

    computed = run(is_killed=True)
    assert computed["from disk"][0].token_ids == [0]
    assert len({tuple(outcome.token_ids) for outcome in computed["outputs"]}) > 1
    files = sorted(disk.glob(f"*{SUFFIX}"))
    assert len(files) == 2
    assert len({path.stem.split("-")[0] for path in files}) == 1
    # What one rank wrote last is torn, and so is the other's index.
    files[0].with_suffix(INDEX_SUFFIX).unlink()
    with files[0].open("r+b") as file:
        file.truncate(files[0].stat().st_size - 1)
    files[1].with_suffix(INDEX_SUFFIX).write_bytes(b"torn")
    again = run(is_killed=False)
    tokens = [outcome.token_ids for outcome in computed["outputs"]]
    assert [outcome.token_ids for outcome in again["outputs"]] == tokens
    assert [outcome.cached_len for outcome in again["outputs"][:-1]] == [CACHED] * (PROMPTS - 1)
    assert again["from disk"][0].token_ids[0] >= (PROMPTS - 1) * CACHED
