"""Guards the documentation's commands: each block of README and docs that is marked `sh` is run here, as it
stands but for the substitutions below, or a comment before it says which machine it needs or what runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.demo import demo_checkpoint
from tests.helpers.ports import free_port
from tests.helpers.stack import ROOT, Stack, running_stack
from tests.helpers.waiting import wait_ready

# The pages' commands name http://; processes speak TLS with one another all the same.
pytestmark = pytest.mark.plain_http
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(
    r"(?:^<!-- (needs|run by): (.+?) -->\n)?^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
LANGUAGES = {"sh", "python", "text", "json", "yaml", "toml"}
# What a command says -> what is run, in this order. {…}: fields of `Here`.
SUBSTITUTIONS = (
    # The programs of this environment, the demo model, and the server that this file started.
    (r"(?:\.venv/bin/|~/moebius-venv/bin/)moebius ", "moebius "),
    (r"\b(?:Qwen|unsloth)/[\w./:-]+|/models/[\w.-]+|\bMODEL\b|(?<=moebius run )demo\b", "{model}"),
    (r"http://127\.0\.0\.1:8000", "{url}"),
    (r"(moebius experts record \w+)", r"\1 --engine-address {engine}"),
    (r"moebius chat\b", "moebius chat --base-url {url} --max-tokens 4"),
    # Short answers.
    (r'"messages": \[', '"max_tokens": 4, "messages": ['),
    (r"moebius run \S+", r"\g<0> --device cpu --max-tokens 4"),
    # A server that would stay up only says what it would do; the demo model has 16 experts.
    (r"moebius serve .*", r"\g<0> --dry-run --device cpu"),
    (r"--gpu-experts 32", "--gpu-experts 4"),
    # Processes of their own, in places of their own.
    (r"/tmp/", "{directory}/"),
    (r"moebius-mine", "{mailbox}"),
    (r"moebius gpu demo", r"\g<0> --device cpu"),
    (r"moebius gateway demo", r"\g<0> --port {port}"),
    (r"\bmoebius (?=[a-z])", "{python} -m moebius "),
)
FLAGS = ("--device", "cpu", "--expert-servers", "2")
STAYS = re.compile(r"-m moebius (?:expert|gpu|gateway) ")


@dataclass(frozen=True)
class Block:
    """One fenced block; filled by `blocks`."""

    page: Path
    number: int
    marker: str | None  # "needs" or "run by"
    says: str
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}-{self.number}"


@dataclass(frozen=True)
class Here:
    """What takes the place of the reader's machine; filled by `here`."""

    python: str
    model: str
    url: str
    engine: str
    directory: str
    mailbox: str
    port: int


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for number, found in enumerate(FENCE.finditer(page.read_text()), start=1):
            yield Block(page, number, found[1], found[2] or "", found[3], found[4])


ALL = list(blocks())
TO_RUN = [block for block in ALL if block.language in ("sh", "python") and block.marker is None]


def substituted(text: str, here: Here) -> str:
    """`text` with the table applied, line by line."""
    lines = []
    for line in text.replace("\\\n", " ").splitlines():
        for pattern, replacement in SUBSTITUTIONS:
            command, hash_sign, comment = line.partition("  #")
            line = re.sub(pattern, replacement, command) + hash_sign + comment
        for name, value in vars(here).items():
            line = line.replace(f"{{{name}}}", str(value))
        lines.append(line)
    return "\n".join(lines)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The demo model, which all pages talk to."""
    directory = tmp_path_factory.mktemp("docs")
    with running_stack(demo_checkpoint(), directory, *FLAGS, timeout_s=300) as running:
        yield running


@pytest.fixture
def here(stack: Stack, tmp_path: Path) -> Here:
    (engine,) = stack.state_dir.glob("*/gpu.sock")
    model, mailbox = str(demo_checkpoint()), f"moebius-docs-{os.getpid()}"
    address = f"unix:{engine}"
    return Here(sys.executable, model, stack.base_url, address, str(tmp_path), mailbox, free_port())


def environment() -> dict[str, str]:
    """With our packages, which commands are not run next to, before what a run with `--tls` has there."""
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def run_shell(text: str, directory: Path, log: Path) -> None:
    """Fails with what was printed."""
    with log.open("w") as sink:
        done = subprocess.run(
            ["bash", "-ec", text],
            cwd=directory,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            timeout=240,
        )
    assert done.returncode == 0, f"{text}\n{log.read_text()[-3000:]}"


def run_together(text: str, directory: Path, log: Path, here: Here) -> None:
    """Processes that stay up, one a line; passes when the gateway among them is ready."""
    processes = []
    with log.open("wb") as sink:
        try:
            for line in text.splitlines():
                command = ["bash", "-c", f"exec {line}"]
                processes.append(
                    subprocess.Popen(command, cwd=directory, env=environment(), stdout=sink, stderr=sink)
                )
            wait_ready(f"http://127.0.0.1:{here.port}", processes[-1], log)
        finally:
            for process in reversed(processes):
                process.terminate()
            for process in processes:
                process.wait(timeout=60)
            Path("/dev/shm", here.mailbox).unlink(missing_ok=True)


def case(block: Block) -> Any:
    """`make test-all` runs pages other than README.md: what their commands do has tests of its own."""
    is_first_page = block.page == ROOT / "README.md"
    return pytest.param(block, id=block.name, marks=[] if is_first_page else pytest.mark.full)


@pytest.mark.demo
@pytest.mark.parametrize("block", [case(block) for block in TO_RUN])
def test_a_block_of_commands_runs(block: Block, here: Here, tmp_path: Path) -> None:
    """The block runs from the first line to the last, with exit status 0."""
    text, log = substituted(block.text, here), tmp_path / "log"
    if block.language == "python":
        (tmp_path / "example.py").write_text(text.replace("temperature=0,", "temperature=0, max_tokens=4,"))
        run_shell(f"{sys.executable} example.py", tmp_path, log)
    elif STAYS.search(text):
        run_together(text, tmp_path, log, here)
    else:
        run_shell(text, tmp_path, log)
    assert log.read_text().strip(), "nothing was printed"


def test_each_block_says_what_it_is() -> None:
    """A fence without a language, or with a marker that names nothing, would never be run; one whose marker
    is not one of the two would be run where it cannot."""
    for page in PAGES:
        comments = re.findall(r"^<!-- (.*?) -->\n```", page.read_text(), re.MULTILINE)
        assert not [text for text in comments if not re.match("needs: |run by: ", text)], page.name
    wrong = [block.name for block in ALL if block.language not in LANGUAGES]
    assert not wrong, f"the language is one of {sorted(LANGUAGES)}"
    fences = {page: page.read_text().count("\n```") for page in PAGES}
    assert {page: 2 * sum(block.page == page for block in ALL) for page in PAGES} == fences
    for block in ALL:
        if block.marker == "run by":
            assert (ROOT / block.says).exists(), block.name


def test_commands_are_in_blocks_that_are_marked() -> None:
    """Indented code and other languages hold no command of ours."""
    for page in PAGES:
        for line in page.read_text().splitlines():
            assert not re.match(" +```", line), f"{page.name}: a block that is indented is not seen here"
            assert not re.match(r" {4,}(?:\.venv/bin/)?moebius [a-z]+", line), f"{page.name}: {line}"
    for block in ALL:
        if block.language in ("text", "json", "yaml", "toml"):
            assert not re.search(r"^(?:\.venv/bin/)?moebius [a-z]", block.text, re.MULTILINE), block.name
