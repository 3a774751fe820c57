"""Which running server a command means."""

from __future__ import annotations

from pathlib import Path

_DEFAULT_URL = "http://127.0.0.1:8000"


def server_url(given: str, state_dir: Path | None = None) -> str:
    """Returns a server's URL: as it is given, or of the server on this host with that port or model.

    Empty: of the only one that runs here, else of the usual port, where a container's is. Raises UserError
    when no server here has the port or model, or none of several is at the usual port.
    """
    if "://" in given:
        return given
    # Not for a URL, whose server may run on another host: it takes a while.
    from app.supervisor.plan import default_state_dir
    from app.supervisor.running_systems import chosen_system, running_systems

    systems = [system for system in running_systems(state_dir or default_state_dir()) if system.url]
    if not given and (not systems or any(system.url == _DEFAULT_URL for system in systems)):
        return _DEFAULT_URL
    return chosen_system(systems, given).url
