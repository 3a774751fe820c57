"""Guards `pytest --tls`: that it changes what it says, also in processes that tests start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import tls_everywhere
from tests.helpers.stack import ROOT

TEST = """
import subprocess, sys
import grpc, pytest
from moebius.config import MoebiusConfig, SecurityConfig
from moebius.network.grpc_channels import active_tls
from tests.helpers import tls_everywhere
from tests.helpers.gateway_server import gateway_config

PROGRAM = "from moebius.config.loader import load_config; print(load_config(None).security.grpc_tls)"

def test_defaults():
    assert MoebiusConfig().security.grpc_tls == gateway_config("x").security.grpc_tls == "mutual"
    assert MoebiusConfig.model_validate({"security": {}}).security.grpc_cert_file.endswith("tls.crt")
    assert active_tls().is_mutual
    assert tls_everywhere.scheme() == "https"
    assert tls_everywhere.with_https(gateway_config("x")).security.http_cert_file
    started = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert started.stdout == "mutual\\n", started.stderr
    assert SecurityConfig(grpc_tls="off").grpc_tls == "off"
"""


def test_settings_mean_tls_here_and_in_processes(tmp_path: Path) -> None:
    """Otherwise the tests would pass without having shown anything; one that is marked speaks plain HTTP."""
    if tls_everywhere.is_on():
        pytest.skip("this run has it on already")
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "test_plain.py").write_text(
        "import pytest\nfrom tests.helpers import tls_everywhere\npytestmark = pytest.mark.plain_http\n"
        "def test_it():\n    assert tls_everywhere.is_on() and tls_everywhere.scheme() == 'http'\n"
    )
    command = [sys.executable, "-m", "pytest", "--tls", "-p", "tests.conftest", "--rootdir", str(ROOT)]
    command += ["-c", str(ROOT / "pyproject.toml"), str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "[100%]" in run.stdout
