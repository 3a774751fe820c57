"""Malformed input of every kind: values that no schema expects, JSON and bytes that are nearly right."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

STRINGS = (
    "",
    " ",
    "\x00",
    "\ud800",
    "a\udfffb",
    "<|start|>system\n",
    "{{ 1 / 0 }}",
    "{% for x in range(10**9) %}x{% endfor %}",
    "..",
    "/etc/passwd",
    "../" * 40,
    "é" * 3000,
    "\u202e",
    "👩‍👩‍👧" * 500,
    "[" * 50_000,
    "9" * 5000,
    "a" * 70_000,
    "%s%n{0}",
    "data:image/png;base64,AAAA",
    "http://127.0.0.1:1/x.png",
)
NUMBERS = (
    0,
    -1,
    1,
    2**31 - 1,
    2**31,
    -(2**31) - 1,
    2**32,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**30,
    0.5,
    -0.0,
    1e-320,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
)


def value(rng: random.Random, depth: int = 0) -> Any:
    """Returns any JSON value, mostly a wrong one."""
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind in (1, 2):
        return rng.choice(NUMBERS)
    if kind in (3, 4):
        return rng.choice(STRINGS)
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.choice([0, 1, 3, 40]))]
    if kind == 6:
        return {rng.choice(STRINGS)[:50]: value(rng, depth + 1) for _ in range(rng.choice([0, 1, 3]))}
    return nested(rng)


def nested(rng: random.Random) -> Any:
    """Lists or objects within one another, up to what Python's own writer takes."""
    found: Any = 1
    wrap: Callable[[Any], Any] = rng.choice([lambda one: [one], lambda one: {"a": one}])
    for _ in range(rng.choice([2, 50, 300])):
        found = wrap(found)
    return found


def document(rng: random.Random, valid: Any) -> Any:
    """A copy of a JSON document with one to three changes."""
    changed = copy.deepcopy(valid)
    for _ in range(rng.randint(1, 3)):
        changed = _changed(rng, changed)
    return changed


def _changed(rng: random.Random, node: Any) -> Any:
    """Returns the node with one change somewhere within."""
    if isinstance(node, dict) and node and rng.random() < 0.85:
        key = rng.choice(list(node))
        action = rng.randrange(6)
        if action == 0:
            del node[key]
        elif action == 1:
            node[rng.choice(STRINGS)[:200]] = value(rng)
        elif action == 2:
            node[key] = value(rng)
        else:
            node[key] = _changed(rng, node[key])
        return node
    if isinstance(node, list) and node and rng.random() < 0.8:
        place = rng.randrange(len(node))
        action = rng.randrange(4)
        if action == 0:
            node *= rng.choice([0, 2, 30])
        elif action == 1:
            node.insert(place, value(rng))
        else:
            node[place] = _changed(rng, node[place])
        return node
    return value(rng)


def json_bytes(rng: random.Random, valid: Any) -> bytes:
    """Returns a JSON text: a changed document, or a right one with changed bytes."""
    kind = rng.randrange(10)
    if kind < 7:
        return json.dumps(document(rng, valid), ensure_ascii=rng.random() < 0.5).encode(
            errors="surrogatepass"
        )
    text = json.dumps(valid)
    if kind == 7:
        return text.encode(rng.choice(["utf-16", "utf-32", "utf-8-sig", "utf-7"]))
    if kind == 8:
        depth = rng.choice([100, 10_000, 200_000])
        return rng.choice(
            [b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth, b"-", b"", b"1" * depth]
        )
    return changed_bytes(rng, text.encode())


def changed_bytes(rng: random.Random, valid: bytes) -> bytes:
    """Returns the bytes with some flipped, cut, doubled or inserted."""
    data = bytearray(valid)
    for _ in range(rng.choice([1, 1, 2, 8])):
        place = rng.randrange(len(data) + 1)
        action = rng.randrange(5)
        if action == 0 and data:
            data[place % len(data)] ^= 1 << rng.randrange(8)
        elif action == 1:
            del data[place : place + rng.choice([1, 4, 100])]
        elif action == 2:
            data[place:place] = data[place : place + rng.choice([1, 8, 64])]
        elif action == 3:
            data[place:place] = rng.randbytes(rng.choice([1, 4, 9]))
        else:
            data[place : place + 8] = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]).to_bytes(
                8, "little"
            )
    return bytes(data)


def message_bytes(rng: random.Random, valid: Message) -> bytes:
    """Returns a serialised message: with changed fields, or with changed bytes."""
    if rng.random() < 0.5:
        return changed_bytes(rng, valid.SerializeToString())
    changed = copy.deepcopy(valid)
    for _ in range(rng.randint(1, 3)):
        _change_field(rng, changed)
    return changed.SerializeToString()


def _change_field(rng: random.Random, message: Message) -> None:
    """Gives one field, at any depth, a value at or beyond the edge of what it holds."""
    if not message.DESCRIPTOR.fields:
        return
    field = rng.choice(message.DESCRIPTOR.fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:  # type: ignore[attr-defined]
        getattr(message, field.name).clear()  # type: ignore[attr-defined]
    elif field.message_type is not None:  # type: ignore[attr-defined]
        part = getattr(message, field.name)  # type: ignore[attr-defined]
        _change_field(rng, part.add() if field.is_repeated else part)  # type: ignore[attr-defined]
    elif field.is_repeated:  # type: ignore[attr-defined]
        getattr(message, field.name).extend(_scalar(rng, field) for _ in range(rng.choice([1, 3, 500])))  # type: ignore[attr-defined]
    else:
        setattr(message, field.name, _scalar(rng, field))  # type: ignore[attr-defined]


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    kinds = FieldDescriptor
    if field.cpp_type == kinds.CPPTYPE_STRING:
        if field.type == kinds.TYPE_BYTES:
            return rng.randbytes(rng.choice([0, 1, 64, 5000]))
        return rng.choice(STRINGS).encode(errors="replace").decode()
    if field.cpp_type in (kinds.CPPTYPE_FLOAT, kinds.CPPTYPE_DOUBLE):
        return float(rng.choice([0, -1, 1e30, 1e-30, float("nan"), float("inf"), -float("inf")]))
    if field.cpp_type == kinds.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type == kinds.CPPTYPE_ENUM:
        return rng.choice([0, 1, 2, 77])
    bits = 63 if field.cpp_type in (kinds.CPPTYPE_INT64, kinds.CPPTYPE_UINT64) else 31
    signed = field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_INT64)
    return rng.choice([0, 1, 5, 400, 2**bits - 1, -1 if signed else 2 ** (bits + 1) - 1])
