"""The files of `tests/data/checkpoints` as checkpoints without data."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebius.checkpoint.index import NUMPY_DTYPES, CheckpointIndex, TensorInfo

FIXTURES = Path(__file__).parents[1] / "data" / "checkpoints"
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
# Of thousands of experts with a tensor of their own, the first and the last stand for all.
_EXPERTS = re.compile(r"(?<=\.experts\.)\{0\.\.(\d+)\}")


@dataclass(frozen=True)
class Published:
    """One model; filled by `load`."""

    config: dict[str, Any]
    # Name pattern, type, shape; see `tests/data/checkpoints/README.md`.
    tensors: list[tuple[str, str, tuple[int, ...]]]

    @staticmethod
    def load(name: str) -> Published:
        """Returns a fixture by its name."""
        content = json.loads((FIXTURES / f"{name}.json").read_text())
        return Published(
            content["config"], [(p, dtype, tuple(shape)) for p, dtype, shape in content["tensors"]]
        )

    @property
    def last_experts(self) -> set[int]:
        """The highest numbers of experts that have tensors of their own; those of drafts do not count."""
        patterns = (pattern for pattern, _, _ in self.tensors if not pattern.startswith("mtp."))
        return {int(match[1]) for pattern in patterns for match in _EXPERTS.finditer(pattern)}

    def index(self, directory: Path) -> CheckpointIndex:
        """Returns all tensors, of experts with tensors of their own the first and the last.

        Writes config.json.
        """
        (directory / "config.json").write_text(json.dumps(self.config))
        tensors = {}
        for pattern, dtype, shape in self.tensors:
            nbytes = math.prod(shape) * NUMPY_DTYPES[dtype].itemsize
            for name in expand(_EXPERTS.sub(r"{0,\1}", pattern)):
                assert name not in tensors, f"{name} is there twice"
                tensors[name] = TensorInfo(name, directory / "model.safetensors", dtype, shape, 0, nbytes)
        return CheckpointIndex(directory, tensors)


def expand(pattern: str) -> list[str]:
    """All names of a pattern: `{3..60}` is a range, `{0,4,8}` a list."""
    parts = re.split(r"\{([^}]*)\}", pattern)
    choices = [[part] if i % 2 == 0 else _choices(part) for i, part in enumerate(parts)]
    return ["".join(name) for name in itertools.product(*choices)]


def count(pattern: str) -> int:
    """How many names `expand` would give."""
    return math.prod(len(_choices(choices)) for choices in re.findall(r"\{([^}]*)\}", pattern))


def _choices(text: str) -> list[str]:
    match = _RANGE.fullmatch(f"{{{text}}}")
    return text.split(",") if match is None else [str(i) for i in range(int(match[1]), int(match[2]) + 1)]
