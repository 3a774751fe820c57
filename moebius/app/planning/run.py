"""What `moebius plan` and `moebius serve --dry-run` do."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
import typer

from moebius.app.planning.capacity import CapacityPlan, Wish
from moebius.app.planning.detect import hardware
from moebius.app.planning.document import write_document
from moebius.app.planning.hardware import HardwareOptions
from moebius.app.planning.make import make_plan
from moebius.app.planning.refusal import DoesNotFit
from moebius.app.planning.table import print_plan
from moebius.checkpoint.index import has_weights
from moebius.checkpoint.moe_config import MoeGeometry
from moebius.config import MoebiusConfig

EXIT_DOES_NOT_FIT = 1


def run(
    config: MoebiusConfig, options: HardwareOptions, wish: Wish, fill: bool, json_file: Path | None = None
) -> CapacityPlan:
    """Prints the plan and writes it, if asked, as JSON.

    Raises typer.Exit with status 1, after one line on stderr, when it does not fit; UserError for all else.
    """
    try:
        with _quiet():
            host = hardware(options)
            _refuse_incomplete(config)
            found = make_plan(config, host, wish, fill)
    except DoesNotFit as error:
        print(f"moebius: does not fit: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(EXIT_DOES_NOT_FIT) from error
    print_plan(found)
    if json_file is not None:
        write_document(found, json_file)
    return found


def _refuse_incomplete(config: MoebiusConfig) -> None:
    """What services prove of their tensors before they read one, in their words, where there are any.

    Raises CheckpointError or ModelConfigError.
    """
    directory = config.model.model
    if not has_weights(directory):
        return
    from expert_service.load_plan import plan_load
    from gpu_service.assembly.forecast import read_model
    from gpu_service.loader.load import check_weights

    geometry = MoeGeometry.from_config(directory, config.model.top_k)
    if geometry.moe_layers:
        plan_load(geometry, directory, config.experts.expert_dtype)
    check_weights(read_model(config), directory)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keys of config.json that nothing reads are news when a model is loaded, not when it is planned."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    try:
        yield
    finally:
        structlog.configure(**before)
