"""Command lines of `moebius` in this process: imports take another one a second of a core."""

from __future__ import annotations

import contextlib
import io
from unittest import mock

import pytest

from app import cli


def run_cli(*arguments: object, typed: str = "") -> tuple[int, str, str]:
    """Returns exit status, stdout and stderr of a command whose standard input is `typed`."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch("sys.stdin", io.StringIO(typed)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main([str(argument) for argument in arguments])
    return int(ended.value.code or 0), out.getvalue(), err.getvalue()
