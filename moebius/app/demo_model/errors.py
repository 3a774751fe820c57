"""The one error type of the demo model builder."""

from __future__ import annotations


class DemoModelError(RuntimeError):
    """The demo model can not be built or is damaged; the message names the cause and what to do."""
