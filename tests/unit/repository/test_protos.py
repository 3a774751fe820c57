"""Guards that the checked-in gRPC stubs are what the .proto files generate, every field documented."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROTOS = [f"protos/{name}.proto" for name in ("engine", "expert", "ranks", "smg_common", "vllm_engine")]


def test_stubs_are_current(tmp_path: Path) -> None:
    """A .proto edited without `make protos` would let the services disagree about the wire."""
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *PROTOS], cwd=ROOT, check=True
    )
    generated = sorted((tmp_path / "protos").iterdir())
    assert len(generated) == 3 * len(PROTOS)
    for file in generated:
        assert file.read_text() == (ROOT / "protos" / file.name).read_text(), (
            f"{file.name} is stale: make protos"
        )


@pytest.mark.parametrize("proto", PROTOS)
def test_every_field_is_documented(proto: str) -> None:
    """A field without its unit, range or meaning is a contract that cannot be kept."""
    field = re.compile(r"^\s+[\w<>, .]+\s(\w+)\s*=\s*\d+;(.*)$")
    fields = [match for line in (ROOT / proto).read_text().splitlines() if (match := field.match(line))]
    assert fields
    undocumented = [match.group(1) for match in fields if "//" not in match.group(2)]
    enum_values = [name for name in undocumented if name.isupper()]
    assert undocumented == enum_values
