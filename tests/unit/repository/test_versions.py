"""Guards the version: every file of the repository that names one names that of `moebius.__version__`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from moebius import __version__

ROOT = Path(__file__).resolve().parents[3]
IMAGE = re.compile(r"\bmoebius:(\d+\.\d+\.\d+)-(?:cpu|cuda)\b")


def test_packages_and_the_chart_have_the_version() -> None:
    """A release changes one number, and a place that was forgotten fails here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((ROOT / "k8s/chart/Chart.yaml").read_text())
    assert [project["version"], chart["version"], chart["appVersion"]] == [__version__] * 3


@pytest.mark.parametrize(
    "file", ["deploy/Dockerfile.cpu", "deploy/Dockerfile.cuda", "deploy/compose.yaml", "docs/containers.md"]
)
def test_images_have_the_version(file: str) -> None:
    """Commands that are copied from a file build and run the image of this version."""
    assert set(IMAGE.findall((ROOT / file).read_text())) == {__version__}


def test_the_changelog_has_a_section_for_the_version() -> None:
    """A reader of the changelog finds what the installed version brought."""
    assert re.search(rf"^## \[{re.escape(__version__)}\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
