"""Two expert servers whose experts an engine on a GPU can map, and that engine's settings."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moebius.config import MoebiusConfig
from tests.helpers.expert_cluster import Cluster, running_cluster
from tests.helpers.tiny_models import make_tiny_model


@contextlib.contextmanager
def mapped_cluster(directory: Path, split: str, **experts: Any) -> Iterator[Cluster]:
    """Servers of a tiny model, divided by `split` ("tensor", "expert"); `experts`: more of their settings.

    Their memory is in a tmpfs, as `serve` makes it: CUDA registers no file of a disk.
    """
    make_tiny_model("qwen3_moe", directory / "model")
    division: dict[str, Any] = {"split_count": 2, "expert_split": split}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        running_cluster(
            directory / "model",
            directory,
            dtype="float32",
            expert_weights_dir=memory,
            **division,
            **experts,
        ) as running,
    ):
        yield running


def gpu_settings(cluster: Cluster, **gpu: Any) -> MoebiusConfig:
    """Returns the settings of a small engine on the GPU; `gpu`: more of them."""
    small: dict[str, Any] = {
        "num_pages": 128,
        "page_size": 4,
        "max_num_seqs": 8,
        "cuda_graph_max_batch_size": 8,
    }
    document = cluster.config.model_dump()
    # FlashInfer computes no float32, and its modules take a minute to compile.
    small |= {"device": "cuda", "attention_backend": "triton", "prefix_caching": False}
    document["gpu"] |= small | {"max_num_batched_tokens": 32} | gpu
    return MoebiusConfig.model_validate(document)
