"""What is said when a plan does not fit, and what would."""

from __future__ import annotations

from collections.abc import Mapping

from moebius.errors import UserError

GIB = 2**30


class DoesNotFit(UserError):
    """The hardware is too small for the plan; the message says by how much, and what would fit."""


def gib(nbytes: float) -> str:
    """For sentences: whole GiB, one digit below ten."""
    return f"{nbytes / GIB:.1f}" if nbytes < 10 * GIB else f"{nbytes / GIB:.0f}"


def ram_refusal(wanted: int, experts: int, allowed: int, chosen: str, alternatives: Mapping[str, int]) -> str:
    """`alternatives`: expert_dtype -> what all would take; of them the ones that take less are named."""
    text = (
        f"needs {gib(wanted)} GiB of RAM ({gib(experts)} for experts in {chosen}), "
        f"{gib(allowed)} GiB are allowed"
    )
    smaller = {name: size for name, size in alternatives.items() if size < wanted}
    if smaller:
        needed = ", ".join(f"{name} needs {gib(size)}" for name, size in smaller.items())
        text += f"; --expert-dtype {needed}"
    if all(size > allowed for size in smaller.values()):
        text += (
            "; none of these fits: more RAM, more of the experts on GPUs, or expert servers on other hosts"
        )
    return text


def node_refusal(node: int, wanted: int, allowed: int) -> str:
    """A NUMA node that its expert servers do not fit, although all nodes together would do."""
    return (
        f"NUMA node {node} needs {gib(wanted)} GiB for its expert servers, {gib(allowed)} GiB of it are "
        "allowed; "
        "split_shares or a number of expert_servers that the nodes divide evenly would spread them"
    )


def kv_refusal(context: int, concurrency: int, tokens: int, token_bytes: float) -> str:
    """A wanted context and concurrency that the KV cache has no room for."""
    wanted = context * concurrency
    text = (
        f"{concurrency} streams of {context} tokens need {gib(wanted * token_bytes)} GiB of KV cache, "
        f"{gib(tokens * token_bytes)} GiB ({tokens} tokens) are left"
    )
    fits = []
    if tokens >= context:
        fits.append(f"{tokens // context} streams of {context} tokens")
    if tokens >= concurrency:
        fits.append(f"{concurrency} streams of {tokens // concurrency} tokens")
    return f"{text}; what would fit: {', or '.join(fits)}" if fits else text
