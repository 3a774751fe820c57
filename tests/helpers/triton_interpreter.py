"""Patches Triton 3.6's interpreter: for numpy 2.4, and so that tests take less than half of its time.

The interpreter holds scalars as arrays of one element and turns them into integers with `int`, which numpy
now refuses: with this, kernels may loop over bounds that they loaded. It searches `triton.language` for what
it replaces at each launch and each call of a function within: here once, and a launch replaces a module's
functions once. It makes the type and the shape of each value from nothing: here values share them. It tells
numpy's types by a table that it writes for each value, and brings operands of one type to a common one: here
neither is done. And it computes twice whether integers overflow, without a look at the result, which is only
asserted where its options say `debug`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.helpers.triton_arithmetic import faster, shape_of

_patch_tensor, _patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang
_make_block_type = tl.core.block_type.__init__
_to_common_type = TritonSemantic.binary_op_type_checking_impl
_create_dot = interpreter.InterpreterBuilder.create_dot
_numpy_type = cache(interpreter._get_np_dtype)
# Ids of the globals of functions for which the launch that runs has replaced what they call.
_replaced: set[int] = set()


class _Scope(interpreter._LangPatchScope):  # type: ignore[misc]
    """What a launch has replaced, which is put back at its end."""

    def restore(self) -> None:
        _replaced.clear()
        super().restore()


def _patch_with_index(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_once(fn: Callable[..., Any]) -> Any:
    """Returns the scope of a launch, which begins with nothing replaced; that of a call is not used."""
    if id(fn.__globals__) in _replaced:
        return None
    _replaced.add(id(fn.__globals__))
    return _patch_lang(fn)


@cache
def _replacements(package: Any) -> list[tuple[str, Any]]:
    """Returns what a launch replaces and by what, made before the first one replaces anything."""
    found = []
    for name, member in inspect.getmembers(package):
        if tl.core.is_builtin(member):
            interpreted = _interpreted(member)
            found.append((name, faster(name, interpreted) if package is tl.core.tensor else interpreted))
    return found


def _interpreted(member: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    return call


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name, replacement in _replacements(package):
        scope.set_attr(package, name, replacement)


@cache
def _block_type(element: Any, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Returns the attributes of a type."""
    made = object.__new__(tl.core.block_type)
    _make_block_type(made, element, list(sizes))
    return {**vars(made), "sizes": sizes}


def _block_init(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
    vars(self).update(_block_type(element_ty, tuple(getattr(size, "value", size) for size in shape)))


def _tensor_init(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = shape_of(type.sizes if type.is_block() else ())


def _get_numpy_type(type: Any) -> Any:
    return _numpy_type(type.scalar)


def _of_common_type(self: Any, left: Any, right: Any, *checks: bool, **named: bool) -> tuple[Any, Any]:
    """Returns operands of one numeric type and shape as they are, but not those of a division or of bits,
    which ask for more than whether they may be pointers."""
    if (
        len(checks) <= 2
        and not named
        and isinstance(left, tl.core.tensor)
        and isinstance(right, tl.core.tensor)
        and left.dtype is right.dtype
        and left.shape is right.shape
        and not left.dtype.is_ptr()
    ):
        return left, right
    found: tuple[Any, Any] = _to_common_type(self, left, right, *checks, **named)
    return found


def _dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """Returns sums of products in the result's format; numpy calls BLAS for operands that have it, too."""
    if d.data.dtype.kind != "f" or a.data.dtype.kind != "f" or b.data.dtype.kind != "f":
        return _create_dot(self, a, b, d, *_)
    product = np.matmul(a.data.astype(d.data.dtype), b.data.astype(d.data.dtype))
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


interpreter._LangPatchScope = _Scope
interpreter.InterpreterBuilder.create_dot = _dot
interpreter._patch_lang_tensor = _patch_with_index
interpreter._patch_lang = _patch_once
interpreter._patch_builtin = _patch_builtin
interpreter._get_np_dtype = _get_numpy_type
interpreter.interpreter_builder.options = dataclasses.replace(
    interpreter.interpreter_builder.options, sanitize_overflow=False
)
TritonSemantic.binary_op_type_checking_impl = _of_common_type
tl.core.pointer_type.__hash__ = lambda self: hash(self.name)
tl.core.block_type.__init__ = _block_init
tl.core.tensor.__init__ = _tensor_init
