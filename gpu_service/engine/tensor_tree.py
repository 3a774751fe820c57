"""Plans and outputs as trees of tensors: dataclasses, lists and tuples with tensors as leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

Tree = TypeVar("Tree")


def tensors_of(tree: object) -> list[torch.Tensor]:
    """All leaves, in the order of fields and elements."""
    return list(_walk(tree))


def with_tensors(tree: Tree, tensors: list[torch.Tensor]) -> Tree:
    """The same tree with other leaves, as many as `tensors_of` returns; everything else is shared."""
    replacements = iter(tensors)
    rebuilt: Tree = _map(tree, lambda _: next(replacements))
    return rebuilt


def _is_leafless(tree: list[Any] | tuple[Any, ...]) -> bool:
    """Lengths and rows: thousands of elements, and no tensor among them."""
    return not tree or isinstance(tree[0], int)


def _walk(tree: object) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for element in () if _is_leafless(tree) else tree:
            yield from _walk(element)
    elif dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from _walk(getattr(tree, field.name))


def _map(tree: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        return replace(tree)
    if isinstance(tree, (list, tuple)):
        return tree if _is_leafless(tree) else type(tree)([_map(element, replace) for element in tree])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changes = {f.name: _map(getattr(tree, f.name), replace) for f in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **changes)
    return tree
