"""What every Moebius process shares: configuration, telemetry, checkpoints, kernels' typed face, CLI."""

__version__ = "0.1.0"
