"""Guards short names: each is a page of docs/recipes, and one that is not known lists what is near."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.commands.models import with_checkpoint
from app.hub import HubModel, hub_model
from app.short_names import SHORT_NAMES, full_name
from moebius.config.loader import load_config
from moebius.errors import UserError

RECIPES = Path(__file__).resolve().parents[3] / "docs" / "recipes"


def test_every_recipe_has_a_short_name() -> None:
    """Names are those of the pages, and stand for the repositories that these are about."""
    pages = {page.stem: page.read_text() for page in RECIPES.glob("*.md") if page.stem != "README"}
    found = {name: re.findall(r"^`([^`]+)`:", text, re.MULTILINE)[0] for name, text in pages.items()}
    assert found == SHORT_NAMES


def test_short_names_are_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With any capitals and with a quantisation; a directory of that name comes first, as for all names."""
    repository = "Qwen/Qwen3-Coder-30B-A3B-Instruct"
    assert hub_model("qwen3-coder-30b") == hub_model("Qwen3-Coder-30B") == HubModel(repository, "")
    assert hub_model("qwen3-coder-30b:Q4_K_M") == HubModel(repository, "Q4_K_M")
    assert full_name("owner/name") == "owner/name"
    assert hub_model("qwen3") is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-coder-30b").mkdir()
    assert hub_model("qwen3-coder-30b") is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("qwen3-code-30b", r"did you mean qwen3-coder-30b or qwen3-next-80b\?"),
        ("zzz", "short names: deepseek-v3.2, glm-4.7"),
        ("./nothing", "is named owner/name$"),
    ],
)
def test_an_unknown_name_lists_the_closest(given: str, said: str) -> None:
    """All of them where none is close; a path needs no names."""
    with pytest.raises(UserError, match=said):
        with_checkpoint(load_config(flags={"model": given}))
