"""Guards that processes started by hand, in any order, meet in one mailbox."""

import dataclasses
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from moebius.mailbox import GeometryMismatch, Mailbox, MailboxGeometry, open_mailbox

GEOMETRY = MailboxGeometry(
    num_layers=2, hidden_size=8, top_k=2, num_slots=2, max_rows=4, num_servers=1, dtype="float32"
)
CREATE_AND_DIE = """
import os, sys
from tests.service.test_open_mailbox import GEOMETRY
from moebius.mailbox import Mailbox
box = Mailbox.create(sys.argv[1], GEOMETRY)
os._exit(0)
"""


@pytest.fixture
def name() -> Iterator[str]:
    """A segment name of this test's own, unlinked at the end."""
    chosen = f"moebius-test-{secrets.token_hex(6)}"
    yield chosen
    Mailbox.unlink(chosen)


def test_made_where_there_is_none(name: str) -> None:
    """The engine does not depend on a supervisor; what it makes has the asked geometry."""
    assert open_mailbox(name, GEOMETRY).geometry == GEOMETRY
    assert Mailbox.attach(name, 0, GEOMETRY).geometry == GEOMETRY


def test_an_existing_one_is_joined_or_refused(name: str) -> None:
    """The supervisor's segment is used, never replaced; another geometry is named."""
    held = Mailbox.create(name, GEOMETRY)
    assert open_mailbox(name, held.geometry).geometry == GEOMETRY
    with pytest.raises(GeometryMismatch, match="hidden_size"):
        open_mailbox(name, dataclasses.replace(GEOMETRY, hidden_size=16))


def test_leftover_is_replaced(name: str) -> None:
    """A segment that no process holds, even of another geometry, does not stop a new engine."""
    subprocess.run([sys.executable, "-c", CREATE_AND_DIE, name], check=True, timeout=60)
    wider = dataclasses.replace(GEOMETRY, hidden_size=16)
    assert open_mailbox(name, wider).geometry == wider
