"""Invariant: docs/recipes say what `moebius plan` says today; `make recipes` writes them again."""

from __future__ import annotations

import pytest

from tests.tools.make_recipes import ENOUGH, MACHINES, MODELS, PAGES, page, section


@pytest.mark.covering(1)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_a_recipe_is_what_the_plan_says(model: str, machine: str) -> None:
    """Command, table and what does not fit, of one model on one machine."""
    text = (PAGES / f"{model}.md").read_text()
    assert section(MODELS[model], MACHINES[machine]) in text, "the plan changed: `make recipes`"


@pytest.mark.parametrize("model", MODELS)
def test_a_page_has_every_machine_and_says_what_was_measured(model: str) -> None:
    """Around the sections nothing is written by hand."""
    text = (PAGES / f"{model}.md").read_text()
    parts = {key: f"## {machine.title}" for key, machine in MACHINES.items()}
    head = page(MODELS[model], parts).partition("## ")[0]
    assert text.startswith(head)
    found = [line for line in text.splitlines() if line.startswith("## ")]
    assert found == list(parts.values())


def test_the_overview_names_every_page() -> None:
    """The overview has the model's title and text, and the share of the best speed that a command is chosen
    by.
    """
    text = (PAGES / "README.md").read_text()
    for key, model in MODELS.items():
        assert f"- [{model.title}]({key}.md): {model.text}" in text
    assert f"at least {ENOUGH:.0%} of the best speed" in " ".join(text.split())
    assert {path.stem for path in PAGES.glob("*.md")} == {"README", *MODELS}
