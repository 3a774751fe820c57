"""What every process has: limits of the system, phases of its start, a port for operators."""
