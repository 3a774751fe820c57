"""Reads what went wrong in a device-driven step from the mailbox."""

from __future__ import annotations

from gpu_service.experts.client import ExpertComputeFailed, ExpertUnavailable
from gpu_service.experts.doorbell.interface import ClientFailure
from moebius.mailbox import Mailbox


def failure_of(
    mailbox: Mailbox, deadline_ms: int, reason: str
) -> ExpertUnavailable | ExpertComputeFailed | None:
    """What this client, or else a peer that shares its slots, has reported; None: nothing.

    `reason`: why the host told its device to give up, if it did.
    """
    peers = (client for client in range(mailbox.geometry.num_clients) if client != mailbox.client)
    for client in (mailbox.client, *peers):
        code, server, layer, slot, epoch = mailbox.kernel.client_report(client)
        failure = ClientFailure(code)
        if failure == ClientFailure.NONE:
            continue
        index = server if server < mailbox.geometry.num_servers else -1
        if failure == ClientFailure.COMPUTE:
            text = mailbox.kernel.error_text(slot, index, epoch)
            return ExpertComputeFailed(f"expert server {index}, layer {layer}: {text}")
        texts = {
            ClientFailure.DEADLINE: f"no answer within {deadline_ms} ms",
            ClientFailure.STALE_EPOCH: f"it answered another request than epoch {epoch} of slot {slot}",
            ClientFailure.RESTARTED: "it restarted during the step",
            ClientFailure.ABANDONED: reason or "the host gave up the step",
            ClientFailure.PEER: "another rank gave up the step",
            ClientFailure.SHUT_DOWN: f"mailbox '{mailbox.name}' is shut down",
        }
        return ExpertUnavailable(index, f"{texts[failure]} (layer {layer})")
    return None
