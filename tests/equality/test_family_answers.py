"""Guards the comparison that families on a GPU have to pass: another path of the CPU passes, no other model.

The engine compared here has its experts resident and computes prompts in chunks with decode steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moebius.config import MoebiusConfig
from tests.helpers.family_answers import check_float32, check_half, family_config
from tests.helpers.tiny_models import make_tiny_model

CHECKS = {"float32": check_float32, "bfloat16": check_half}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    found = tmp_path_factory.mktemp("families") / "glm4_moe"
    make_tiny_model("glm4_moe", found)
    return found


@pytest.mark.parametrize("dtype", sorted(CHECKS))
def test_another_path_of_the_same_model_passes(dtype: str, directory: Path) -> None:
    CHECKS[dtype](directory, family_config(directory, "cpu", dtype))


@pytest.mark.parametrize("dtype", sorted(CHECKS))
def test_a_model_with_one_expert_less_does_not(dtype: str, directory: Path) -> None:
    """What a kernel that drops the fourth of four choices would do."""
    config = family_config(directory, "cpu", dtype)
    wrong = config.model_copy(update={"model": config.model.model_copy(update={"experts_per_token": 3})})
    check: Callable[[Path, MoebiusConfig], None] = CHECKS[dtype]
    with pytest.raises(AssertionError, match=r"first above ten medians|which the reference prefers"):
        check(directory, wrong)
