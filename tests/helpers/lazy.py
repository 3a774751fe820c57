"""Libraries that take seconds to import and that few tests use, where every worker imports all test files."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def lazy(name: str) -> Any:
    """The module, imported when something of it is first looked at. Raises ImportError when there is none."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module named {name!r}", name=name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
