"""`python -m tests.tools.checkpoint_names.make`: writes one file for each published model.

A file holds config.json, and lines of [name pattern, type, shape].
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.tools.checkpoint_names.configs import CONFIGS
from tests.tools.checkpoint_names.families import FAMILIES
from tests.tools.checkpoint_names.parts import Config

FIXTURES = Path(__file__).parents[2] / "data" / "checkpoints"


def render(config: Config) -> str:
    """A file's text, a tensor a line."""
    lines = ",\n".join("  " + json.dumps(entry) for entry in FAMILIES[config["model_type"]](config))
    return f'{{\n "config": {json.dumps(config)},\n "tensors": [\n{lines}\n ]\n}}\n'


def main() -> None:
    """Writes all of them."""
    FIXTURES.mkdir(exist_ok=True)
    for name, config in CONFIGS.items():
        (FIXTURES / f"{name}.json").write_text(render(config))


if __name__ == "__main__":
    main()
