"""Sources of GPU kernels, compiled by g++ for the host or by nvcc; kept by their content in the user's cache.

Compiling takes seconds each, and only the first run on a machine has to, not each fresh clone's.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from app.demo_model import default_directory


@cache
def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout


def compiled(command: Sequence[str], source: str, suffix: str = ".cc") -> tuple[Path, str]:
    """Returns what a compiler makes of a source, and what it said on stderr.

    Args:
        command: the compiler and its options, but for those that name files.
        source: all of it: it includes the compiler's own headers only.
        suffix: of a file with that source.

    Raises AssertionError, with the compiler's words, where it fails.
    """
    parts = (*(part.encode() for part in command), _version(command[0]), source.encode())
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()
    directory = default_directory().parent / "compiled-for-tests"
    directory.mkdir(parents=True, exist_ok=True)
    product, said = directory / name, directory / f"{name}.said"
    if not product.exists():
        with tempfile.TemporaryDirectory(dir=directory) as own:
            file, made, words = (Path(own, each) for each in (f"source{suffix}", "made", "said"))
            file.write_text(source)
            run = [*command, "-o", str(made), str(file)]
            done = subprocess.run(run, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            words.write_text(done.stderr)
            os.replace(words, said)
            os.replace(made, product)  # the last, as it says that both are there
    return product, said.read_text()
