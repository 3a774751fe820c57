"""Fixtures of several files in this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.checkpoints import TinyMoe
from tests.helpers.expert_cluster import Cluster, running_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two expert servers of a tiny model, shared by a file's tests."""
    directory = tmp_path_factory.mktemp("cluster")
    model = TinyMoe(family="glm4_moe").write(directory / "model")
    with running_cluster(model, directory, split_count=2, mailbox_deadline_ms=20000) as running:
        yield running
