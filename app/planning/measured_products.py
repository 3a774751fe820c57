"""Measures what a plan for this host assumes of an engine on its CPUs, and keeps it for later plans."""

from __future__ import annotations

from dataclasses import replace

from app.planning.gpu_use import make_planner
from app.planning.hardware import Hardware
from app.planning.host_engine import measured_products
from moebius.config import MoebiusConfig
from moebius.host.kernel_times import times_file, write_times


def with_measured_products(config: MoebiusConfig, hardware: Hardware) -> Hardware:
    """Returns this host with times of the products of dense layers, which are written to the file of kernel
    times as well; as it is where a GPU computes them.

    Raises what `make_planner` raises, and UserError where the file cannot be written.
    """
    planner = make_planner(config, hardware, fill=False)
    if planner.on_gpu:
        return hardware
    found = measured_products(planner.config, planner.model, planner.forecast.ranks, hardware)
    write_times(times_file(), found)
    return replace(hardware, kernel_times=(*found, *hardware.kernel_times))
