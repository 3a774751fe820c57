"""One name, one signature, several implementations: the reference and what a device has that is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """A free function whose first argument is a tensor; that tensor's device type picks the implementation.

    The function it is made from is the torch reference: it defines the contract, runs wherever nothing
    faster is in use, and is what faster ones are tested against. `ops.backends.install` decides once, at
    start, what a device uses; a process on a CPU never comes further than the reference.
    """

    def __init__(self, reference: Callable[P, R]) -> None:
        self.reference = reference
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self._implementations: dict[str, Callable[P, R]] = {}

    def use(self, device_type: str, implementation: Callable[P, R] | None) -> None:
        """Run this on a device type ("cuda", ...) from now on; None: the reference again."""
        if implementation is None:
            self._implementations.pop(device_type, None)
        else:
            self._implementations[device_type] = implementation

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._implementations:
            first = args[0]
            assert isinstance(first, torch.Tensor)
            return self._implementations.get(first.device.type, self.reference)(*args, **kwargs)
        return self.reference(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Implementation:
    """Filled by a backend's table."""

    function: Callable[..., Any]  # the op's signature
    # Whether the op's arguments are within what the library can do; the next backend takes those that are
    # not. None: it takes everything.
    supports: Callable[..., bool] | None = None


def joined(chain: Sequence[Implementation], reference: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what calls the first of the chain that supports the arguments, else the reference."""
    first, *rest = chain
    if first.supports is None:
        return first.function
    function, supports = first.function, first.supports
    otherwise = joined(rest, reference) if rest else reference

    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if supports(*args, **kwargs) else otherwise)(*args, **kwargs)

    return call
