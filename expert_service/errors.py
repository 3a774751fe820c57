"""Reasons why an expert server does not load or compute; `servicer` and `main` report them."""

from __future__ import annotations


class NotServing(RuntimeError):
    """Nothing is loaded yet, or the server is draining."""


class LoadCancelled(Exception):
    """The process was asked to stop while it loaded."""


class AlreadyLoaded(RuntimeError):
    """A process holds one slice for its whole life."""


class RequantiseError(ValueError):
    """Requantising changed the weights of a layer by more than the configuration allows."""
