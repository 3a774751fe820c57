"""Guards the comparison that families on a GPU have to pass: another path of the CPU passes, no other model.

The engine compared here has its experts resident and computes prompts in chunks with decode steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moebius.config import MoebiusConfig
from tests.helpers.expert_cluster import running_cluster
from tests.helpers.family_answers import check_float32, check_half, family_config
from tests.helpers.tiny_models import make_tiny_model

CHECKS = {"float32": check_float32, "bfloat16": check_half}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tiny checkpoint."""
    found = tmp_path_factory.mktemp("families") / "glm4_moe"
    make_tiny_model("glm4_moe", found)
    return found


@pytest.mark.parametrize("dtype", sorted(CHECKS))
def test_another_path_of_the_same_model_passes(dtype: str, directory: Path) -> None:
    CHECKS[dtype](directory, family_config(directory, "cpu", dtype))


@pytest.mark.full  # the mailbox carries the type in tests/kernels; the engine in it: tests/parity
def test_float16_rows_reach_expert_servers_as_they_are(directory: Path, tmp_path: Path) -> None:
    """The path with one server process is as close to float32 as the one whose experts are in process."""
    with running_cluster(directory, tmp_path, dtype="float16", expert_dtype="keep") as cluster:
        experts = cluster.config.experts.model_dump() | {"expert_transport": "mailbox"}
        check_half(directory, family_config(directory, "cpu", "float16", experts))


@pytest.mark.parametrize("dtype", sorted(CHECKS))
def test_a_model_with_one_expert_less_does_not(dtype: str, directory: Path) -> None:
    """What a kernel that drops the fourth of four choices would do."""
    config = family_config(directory, "cpu", dtype)
    wrong = config.model_copy(update={"model": config.model.model_copy(update={"experts_per_token": 3})})
    check: Callable[[Path, MoebiusConfig], None] = CHECKS[dtype]
    with pytest.raises(AssertionError, match=r"first above ten medians|which the reference prefers"):
        check(directory, wrong)
