"""The reference of all settings, `docs/settings.md`, written from the typed tree in `moebius/config`.

`python -m tests.helpers.settings_page` writes it.
"""

from __future__ import annotations

import re
from pathlib import Path

from app.cli import TOPICS
from app.cli_options import MODEL_LEAF
from moebius.config.loader import Leaf, leaves, sections

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
_BEGIN = """# Settings

Every setting is a key of the YAML file that `--config` names, below its section, and an option of the
commands that use it: `max_num_seqs` of section `gpu` is `--max-num-seqs`. Options win over the file. Unknown
keys, and values that are not allowed, are errors, which are listed all at once. `--print-config` prints all
settings of a start, as YAML that `--config` reads.

Lists are YAML lists, and values with commas between them on the command line. There, integers may end in k, m
(32k is 32000) or K, M (32K is 32768). "unset" is YAML's null, and `none` on the command line; "empty" is an
empty text or list.

This page is generated from `moebius/config`; `python -m tests.helpers.settings_page` writes it.
"""
_MARKUP = re.compile(r"([\\*_|\[\]])")


def page_text() -> str:
    """Returns the page: a table per section, in the tree's order."""
    parts = [_BEGIN]
    for name, section in sections().items():
        own = [leaf for leaf in leaves() if leaf.section == name]
        parts.append(
            f"## {TOPICS[name]}\n\n{_prose(section.__doc__ or '')}\n\n"
            "| Key of `" + name + "` | Option | Default | Allowed | What it does |\n"
            "| --- | --- | --- | --- | --- |\n" + "".join(map(_row, own))
        )
    return "\n".join(parts)


def _row(leaf: Leaf) -> str:
    option = f"{leaf.flag}`, `--no-{leaf.flag[2:]}" if leaf.annotation is bool else leaf.flag
    option = "MODEL" if leaf.name == MODEL_LEAF else option
    default = leaf.default_text if leaf.default_text in ("unset", "empty") else f"`{leaf.default_text}`"
    cells = (f"`{leaf.name}`", f"`{option}`", default, _prose(leaf.allowed), _prose(leaf.description))
    return "| " + " | ".join(cells) + " |\n"


def _prose(text: str) -> str:
    """Returns text in which no character is markup, outside what stands in backticks."""
    parts = re.sub(r"\s+", " ", text).strip().replace("<", "&lt;").split("`")
    return "`".join(part if at % 2 else _MARKUP.sub(r"\\\1", part) for at, part in enumerate(parts))


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
