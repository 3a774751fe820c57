"""One name, one signature, several implementations: the reference and what a device has that is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


class Op(Generic[P, R]):
    """A free function whose first argument is a tensor; that tensor's device type picks the implementation.

    The function it is made from is the torch reference: it defines the contract, runs wherever nothing
    faster is registered, and is what faster ones are tested against.
    """

    def __init__(self, reference: Callable[P, R]) -> None:
        self.reference = reference
        self.name = reference.__name__
        self.__doc__ = reference.__doc__
        self._implementations: dict[str, Callable[P, R]] = {}

    def register(self, device_type: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorator: make the function the implementation for a device type ("cuda", ...)."""

        def add(implementation: Callable[P, R]) -> Callable[P, R]:
            if device_type in self._implementations:
                raise ValueError(f"op {self.name} already has an implementation for {device_type}")
            self._implementations[device_type] = implementation
            return implementation

        return add

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._implementations:
            first = args[0]
            assert isinstance(first, torch.Tensor)
            return self._implementations.get(first.device.type, self.reference)(*args, **kwargs)
        return self.reference(*args, **kwargs)
