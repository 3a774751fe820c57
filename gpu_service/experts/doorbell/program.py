"""`doorbell.cu` as seen from the host: launch arguments, words in GPU memory, and constants."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from pathlib import Path

from moebius.mailbox import ClientFailure, Mailbox, field_offsets

SOURCE = Path(__file__).with_name("doorbell.cu")

# What one launch of pack_and_ring does; several may be combined.
PACK_HIDDEN, PACK_RING, PACK_CLEAR = 1, 2, 4
# The same of wait_and_add.
WAIT_ANSWERS, WAIT_ADD = 1, 2


class State(IntEnum):
    """Index of the first 64-bit word of each part of a client's GPU memory."""

    EPOCH = 0  # last epoch given out
    ERROR = 1  # sticky: launches return at once
    TRACE = 2  # 3 words of trace and span id as bytes, then the flags
    GENERATION = 8  # by server: the one that shall answer; 0: any
    SLOT_EPOCH = 32  # by slot
    GATE = 96  # by slot: the epoch for which block 0 has waited
    ARRIVED = 160  # by slot: blocks that have written their rows
    END = 224


class Box(ctypes.Structure):
    """`struct Box` of doorbell.cu; filled by `make_box`."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            *("base", "state", "client_record", "peer_records", "ready_lines", "done_lines", "requests"),
            *("responses", "request_stride", "response_stride", "topk_ids", "topk_weights", "hidden_size"),
            *("top_k", "num_servers", "num_clients", "client", "dtype", "deadline_ns"),
        )
    ]


def make_box(mailbox: Mailbox, base: int, state: int, deadline_ms: int) -> Box:
    """`base`: the segment's address as the device sees it; `state`: that of `State.END` zeroed words."""
    geometry, regions, sizes = mailbox.geometry, mailbox.geometry.regions(), field_offsets()
    line = sizes["ReadyLine"]
    records = sizes["Header.clients"] + mailbox.group * geometry.num_clients * sizes["ClientRecord"]
    return Box(
        base=base,
        state=state,
        client_record=records + mailbox.client * sizes["ClientRecord"],
        peer_records=records,
        ready_lines=regions.flags,
        done_lines=regions.flags + line * geometry.num_slots * geometry.num_clients,
        requests=regions.requests,
        responses=regions.responses,
        request_stride=regions.request_stride,
        response_stride=regions.response_stride,
        topk_ids=regions.topk_ids,
        topk_weights=regions.topk_weights,
        hidden_size=geometry.hidden_size,
        top_k=geometry.top_k,
        num_servers=geometry.num_servers,
        num_clients=geometry.num_clients,
        client=mailbox.client,
        dtype=geometry.to_kernel().dtype,
        deadline_ns=deadline_ms * 1_000_000,
    )


def preamble() -> str:
    """Returns the constants that doorbell.cu expects in front of it."""
    lines = [f"#define MBX_{name.replace('.', '_')} {offset}" for name, offset in field_offsets().items()]
    lines += [f"#define STATE_{word.name} {word.value}" for word in State]
    lines += [f"#define FAILED_{failure.name} {failure.value}u" for failure in ClientFailure]
    return "\n".join(lines) + "\n"


def program() -> str:
    """Returns the complete source of the kernels."""
    return preamble() + SOURCE.read_text(encoding="utf-8")
