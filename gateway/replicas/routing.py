"""Chooses the replica for a request."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.replicas.prefixes import preferred_replica
from gateway.replicas.replica import Replica

# The load of one more full batch outweighs a fully cached prompt this many times.
_LOAD_WEIGHT = 2.0
# Bonus of the preferred replica for an unseen prompt: decides among replicas of about equal load.
_PREFERRED_WEIGHT = 0.1


def choose(replicas: Sequence[Replica], digests: Sequence[bytes]) -> Replica | None:
    """Returns the replica for a prompt with these block digests, or None if none may be used.

    The cost of a replica is the part of the prompt that it would have to compute, plus its load: a prompt
    goes where its prefix is cached unless that replica is so busy that computing elsewhere is faster.
    """
    usable = [replica for replica in replicas if replica.may_be_used]
    if not usable:
        return None
    names = [replica.address for replica in usable]
    preferred = preferred_replica(digests, names) if digests else ""

    def cost(replica: Replica) -> tuple[float, int]:
        missing = 1.0 - replica.prefixes.match(digests) / len(digests) if digests else 1.0
        bonus = _PREFERRED_WEIGHT if replica.address == preferred else 0.0
        return missing + _LOAD_WEIGHT * replica.load - bonus, replica.in_flight

    return min(usable, key=cost)


def last_resort(replicas: Sequence[Replica]) -> Replica | None:
    """Returns a replica that may report why none may be used, for the message to the client."""
    possible = [one for one in replicas if not (one.mismatch or one.is_leaving)]
    return min(possible, key=lambda one: (not one.is_serving, one.ejected_until), default=None)
