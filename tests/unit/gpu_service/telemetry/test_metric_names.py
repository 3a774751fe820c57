"""Guards that parts of the engine export metrics of different names: a registry refuses a second one, and the
engine ends in its warm-up, on a machine that has both parts.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import gpu_service

DECLARE = {"Figure": "moebius:", "Gauge": "", "Counter": "", "Histogram": ""}


def _declared(path: Path) -> list[str]:
    """Returns the names of metrics that a file declares by a literal."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return [
        DECLARE[call.func.id] + call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in DECLARE and call.args
        if isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)
    ]


def test_a_metrics_name_is_declared_once() -> None:
    """The ledger of a GPU's memory and the shares of pages and experts had one name: no model was served on a
    GPU."""
    (root,) = gpu_service.__path__
    declared = Counter(name for path in Path(root).rglob("*.py") for name in _declared(path))
    assert len(declared) >= 30, "the engine's metrics are declared in another way"
    assert [name for name, times in declared.items() if times > 1] == []
