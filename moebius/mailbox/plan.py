"""The mailbox a model and a configuration call for; creator, expert servers and client must agree on it."""

from __future__ import annotations

from moebius.config import MoebiusConfig
from moebius.mailbox import MailboxGeometry, PayloadDtype
from moebius.models.geometry import MoeGeometry

# From here on a request's rows, and not its experts, are what takes time; shared memory is what it takes.
MOST_ROWS = 2048
# A record sent by gRPC has at most this many rows; a step with more goes in several records.
MOST_GRPC_ROWS = 4096
# Of a `Compute` call: the server's instance that is to answer it.
INSTANCE_METADATA = "moebius-instance-id"
# What a server without a model is prepared for: wider than any published model.
_WIDEST_HIDDEN, _LARGEST_TOP_K = 16384, 64
# Of the fields other than the arrays, and of control messages, which grow with layers times experts.
_SMALL_MESSAGES = 4 * 2**20


def activation_dtype(config: MoebiusConfig, model: MoeGeometry) -> PayloadDtype:
    """Returns what hidden states travel as: the engine's activation type."""
    if config.model.dtype != "auto":
        return config.model.dtype
    return "float32" if model.dtype == "float32" else "bfloat16"


def mailbox_geometry(config: MoebiusConfig, model: MoeGeometry) -> MailboxGeometry:
    """Returns one mailbox for all `split_count` servers and all ranks of this model.

    Tensor-parallel ranks fill the same slots together; each pipeline stage has slots of its own.
    """
    return MailboxGeometry(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        top_k=config.model.experts_per_token or model.top_k,
        num_slots=config.experts.mailbox_slots * config.parallel.pipeline_parallel_size,
        max_rows=request_rows(config),
        num_servers=config.experts.split_count,
        dtype=activation_dtype(config, model),
        num_clients=config.parallel.tensor_parallel_size,
    )


def mailbox_names(config: MoebiusConfig) -> tuple[str, ...]:
    """Returns the names of the mailboxes that every expert server answers, one of each engine by its
    `data_parallel_rank`; empty: there is no mailbox.
    """
    name = config.experts.mailbox
    others = (f"{name}-{rank}" for rank in range(1, config.parallel.data_parallel_size))
    return (name, *others) if name else ()


def request_rows(config: MoebiusConfig) -> int:
    """Returns token rows of the largest request.

    Each one reads its experts again, so a step had better be one.
    """
    return config.experts.mailbox_rows or min(config.gpu.num_batched_tokens, MOST_ROWS)


def slots_of(config: MoebiusConfig) -> range:
    """Returns the slots that this rank's pipeline stage uses."""
    stage = config.parallel.rank // config.parallel.tensor_parallel_size
    count = config.experts.mailbox_slots
    return range(stage * count, (stage + 1) * count)


def grpc_message_bytes(model: MoeGeometry | None) -> int:
    """Returns size limit of an expert server's gRPC messages: a record of MOST_GRPC_ROWS rows fits, in
    float32.
    """
    hidden_size, top_k = (model.hidden_size, model.top_k) if model else (_WIDEST_HIDDEN, _LARGEST_TOP_K)
    return MOST_GRPC_ROWS * (4 * hidden_size + 8 * top_k) + _SMALL_MESSAGES
