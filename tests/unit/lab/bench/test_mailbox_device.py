"""Guards the GPU hand-off bench where there is no GPU: what it accepts, prints and compares with."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from app.cli import app
from lab.bench.mailbox_device import TABLE, make_row, parse_signals
from moebius import _kernels_testing as testing
from moebius.errors import UserError
from tests.helpers.mailbox import Call, geometry, new_mailbox, served_mailbox


def test_signals_are_checked() -> None:
    """One unknown name among good ones."""
    assert parse_signals("host,doorbell") == ("host", "doorbell")
    with pytest.raises(UserError, match="'dorbel' is not allowed; allowed: doorbell, memops, host"):
        parse_signals("memops,dorbel")


def test_row_separates_hand_off_from_the_servers_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Median, 99th percentile, bytes each way and the ratio to the limit."""
    row = make_row("doorbell", 4, 64, 2048, 8, 48, [30.0, 20.0, 25.0], 5.0, 2.0)
    assert (row.median_us, row.p99_us, row.hand_off_us, row.ratio) == (25.0, 25.0, 20.0, 10.0)
    assert (row.bytes_out, row.bytes_back) == (64 * (4096 + 64), 64 * 8192 * 4)
    TABLE.print_all([row])
    header, line = capsys.readouterr().out.splitlines()
    assert len(line) == len(header)
    assert "260 KiB" in line


def test_command_refuses_what_it_can_not_measure() -> None:
    """An unknown device, and a GPU where there is none."""
    unknown = CliRunner().invoke(app, ["bench", "mailbox", "--device", "tpu"])
    assert "allowed: cpu, cuda" in str(unknown.exception) + unknown.output
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    missing = CliRunner().invoke(app, ["bench", "mailbox", "--device", "cuda"])
    assert "torch finds no CUDA device" in str(missing.exception) + missing.output


def test_host_functions_are_a_round_trip() -> None:
    """What a stream calls: submit, then collect; an error is counted, not thrown."""
    with served_mailbox(geometry(2)) as box:
        call = Call(box, 5, layer=3)
        arrays = (call.hidden_states, call.topk_ids, call.topk_weights)
        pointers = [array.ctypes.data for array in arrays]
        host = testing.MailboxHostCall(box.kernel, 0, 3, *pointers, 5, call.output.ctypes.data, 5000)
        functions = (host.submit_function, host.collect_function)
        for address in functions:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(host.address)
        np.testing.assert_array_equal(call.output, call.expected())
        assert host.failures == 0
    with new_mailbox(geometry()) as box:
        host = testing.MailboxHostCall(box.kernel, 0, 99, *pointers, 5, call.output.ctypes.data, 10)
        for address in functions:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(host.address)
        assert host.failures == 2
