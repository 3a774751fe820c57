"""Libraries that take seconds to import and that few tests use, where every worker imports all test files."""

from __future__ import annotations

import importlib.util
from typing import Any


class _Lazy:
    """`importlib.util.LazyLoader` imports for any attribute, and pytest looks whether all that a file has is
    wrapped, or a mock."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def lazy(name: str) -> Any:
    """Returns the module, imported when something of it is first used.

    Raises ImportError when there is none.
    """
    if importlib.util.find_spec(name) is None:
        raise ImportError(f"no module named {name!r}", name=name)
    return _Lazy(name)
