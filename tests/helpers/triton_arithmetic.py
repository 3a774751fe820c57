"""Operators of Triton 3.6's interpreter that go straight to numpy, in a tenth of their time.

The interpreter looks up types, brings operands to a common type and shape, and makes a handle and a tensor
at each of these steps. Here an operation whose operands have one number format, or are a tensor and a number
that the format holds, is one call of numpy, which broadcasts by the same rule; so are additions to pointers.
All others, and those that raise, are left to the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

Operator = Callable[..., Any]
# numpy's formats by the ids of Triton's, which are made once; their own hash takes longer than an operation.
_INTEGERS = {
    id(getattr(tl, name)): np.dtype(name)
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}
_NUMBERS = _INTEGERS | {id(getattr(tl, f"float{bits}")): np.dtype(f"float{bits}") for bits in (16, 32, 64)}
_BITS = _INTEGERS | {id(tl.int1): np.dtype(np.bool_)}
_INT32, _INT64 = tl.int32, tl.int64
# Of numbers that are compared the interpreter makes scalars of 32 bits, before it looks at the tensor.
_COMPARED_WITH = {id(tl.int32): int, id(tl.int64): int, id(tl.float32): float}
_LEAST_INT, _MOST_INT = -(2**31), 2**31 - 1
_LEAST_FLOAT, _MOST_FLOAT = 2.0**-126, (2 - 2**-23) * 2.0**127

_tensor, _constexpr = tl.core.tensor, tl.core.constexpr
_block, _pointer = tl.core.block_type, tl.core.pointer_type
_new = object.__new__
# By the id of the element's type, which stays its own as the type is in here, and the sizes.
_known: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}


@cache
def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns a tensor's `shape` and `numel`."""
    return tl.core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _attributes(element: Any, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Returns the attributes of a tensor, but for its handle."""
    key = id(element), sizes
    if key not in _known:
        shape, numel = shape_of(sizes)
        kind = tl.core.block_type(element, list(sizes)) if sizes else element
        _known[key] = {"type": kind, "dtype": element, "shape": shape, "numel": numel}
    return _known[key]


@cache
def _broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the sizes of the result; None: there are none."""
    try:
        return np.broadcast_shapes(left, right)
    except ValueError:
        return None


@lru_cache(4096)
def _constant(kind: type, value: Any, sign: float, dtype: np.dtype[Any]) -> Any:
    """Returns the number as the interpreter has scalars; None where the format does not hold it.

    `kind` and `sign` tell 1 from 1.0, and 0.0 from -0.0.
    """
    if dtype.kind == "f":
        return np.array([value], dtype)
    limits = np.iinfo(dtype)
    return np.array([value], dtype) if kind is int and limits.min <= value <= limits.max else None


def _is_signed(element: Any) -> bool:
    """Whether it is one of the two formats whose common one is the wider."""
    return element is _INT32 or element is _INT64


def _sizes(value: Any) -> tuple[int, ...]:
    kind = value.type
    return kind.sizes if type(kind) is _block else ()


def _made(data: Any, handle_type: Any, element: Any, sizes: tuple[int, ...]) -> Any:
    handle = _new(TensorHandle)
    handle.data, handle.dtype, handle.attr = data, handle_type, {}
    made = _new(_tensor)
    vars(made).update(_attributes(element, sizes))
    made.handle = handle
    return made


def _number(value: Any, dtype: np.dtype[Any]) -> Any:
    """Returns a number's array; None where it is left to the interpreter."""
    kind = type(value)
    if kind is float:
        return _constant(kind, value, math.copysign(1.0, value), dtype) if value == value else None
    return _constant(kind, value, 1.0, dtype) if kind is int else None


def _compared(value: Any, element: Any, dtype: np.dtype[Any]) -> Any:
    """Returns a number's array, where the interpreter compares in the tensor's own format."""
    if type(value) is not _COMPARED_WITH.get(id(element)):
        return None
    if type(value) is int:
        return _number(value, dtype) if _LEAST_INT <= value <= _MOST_INT else None
    size = abs(value)
    return _number(value, dtype) if size == 0 or _LEAST_FLOAT <= size <= _MOST_FLOAT else None


def binary(
    original: Operator, compute: Any, formats: dict[int, np.dtype[Any]], *, reflected: bool, compares: bool
) -> Operator:
    """Returns the operator.

    Args:
        original: the interpreter's.
        compute: numpy's function.
        formats: those for which it is that function: numpy's by the id of Triton's.
        reflected: whether the tensor is the right operand.
        compares: whether the result is true or false.
    """

    def operator(self: Any, other: Any, **rest: Any) -> Any:
        value = other.value if type(other) is _constexpr else other
        element, handle = self.dtype, self.handle
        dtype = formats.get(id(element))
        if dtype is None or handle.data.dtype is not dtype:
            return original(self, other, **rest)
        sizes = _sizes(self)
        if type(value) is _tensor:
            data, handle_type = value.handle.data, value.handle.dtype
            if value.dtype is not element:
                if not (_is_signed(element) and _is_signed(value.dtype)):
                    return original(self, other, **rest)
                if data.dtype is not formats[id(value.dtype)]:
                    return original(self, other, **rest)
                element = handle_type = _INT64
            elif data.dtype is not dtype:
                return original(self, other, **rest)
            found = _broadcast(sizes, _sizes(value))
            if found is None:
                return original(self, other, **rest)
            sizes = found
        else:
            handle_type = element
            data = _compared(value, element, dtype) if compares else _number(value, dtype)
            if data is None:
                return original(self, other, **rest)
        if reflected:
            result = compute(data, handle.data)
        else:
            result = compute(handle.data, data)
            handle_type = handle.dtype if element is self.dtype else _INT64
        return _made(result, handle_type, tl.int1 if compares else element, sizes)

    return operator


def added(original: Operator, plain: Operator) -> Operator:
    """Returns an addition that may be one to a pointer.

    Args:
        original: the interpreter's.
        plain: the one of numbers.
    """

    def operator(self: Any, other: Any, **rest: Any) -> Any:
        element = self.dtype
        if type(element) is not _pointer:
            return plain(self, other, **rest)
        value = other.value if type(other) is _constexpr else other
        sizes = _sizes(self)
        if type(value) is _tensor and _is_signed(value.dtype):
            found, offset = _broadcast(sizes, _sizes(value)), value.handle.data
            if found is None:
                return original(self, other, **rest)
            sizes = found
        elif type(value) is int and _LEAST_INT <= value <= _MOST_INT:
            offset = _constant(int, value, 1.0, _INTEGERS[id(_INT32)])
        else:
            return original(self, other, **rest)
        width = max(1, self.handle.get_element_ty().primitive_bitwidth // 8)
        data = self.handle.data + width * offset.astype(np.uint64)
        return _made(data, self.handle.dtype, element, sizes)

    return operator


# By the names of Triton's operators: numpy's function, formats, and whether the result is true or false.
_OPERATORS = {
    "add": (np.add, _NUMBERS, False),
    "sub": (np.subtract, _NUMBERS, False),
    "mul": (np.multiply, _NUMBERS, False),
    "and": (np.bitwise_and, _BITS, False),
    "or": (np.bitwise_or, _BITS, False),
    "xor": (np.bitwise_xor, _BITS, False),
    "lshift": (np.left_shift, _INTEGERS, False),
    "rshift": (np.right_shift, _INTEGERS, False),
    "gt": (np.greater, _NUMBERS, True),
    "ge": (np.greater_equal, _NUMBERS, True),
    "lt": (np.less, _NUMBERS, True),
    "le": (np.less_equal, _NUMBERS, True),
    "eq": (np.equal, _NUMBERS, True),
    "ne": (np.not_equal, _NUMBERS, True),
}
_BY_NAME = {
    f"__{prefix}{name}__": (*found, bool(prefix))
    for name, found in _OPERATORS.items()
    for prefix in ("", "r")
}


def faster(name: str, original: Operator) -> Operator:
    """Returns what takes the place of a tensor's method `name`, itself where it is no such operator."""
    if name not in _BY_NAME:
        return original
    compute, formats, compares, reflected = _BY_NAME[name]
    found = binary(original, compute, formats, reflected=reflected, compares=compares)
    return added(original, found) if name in ("__add__", "__radd__") else found
