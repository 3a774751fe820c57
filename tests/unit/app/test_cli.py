"""Guards the command line: one flag per setting, one line per user error, and a quick `--help`."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from app import cli
from app.commands.chat import _piped
from app.commands.serve import examples
from moebius.__main__ import direct
from moebius.config import MoebiusConfig
from moebius.config.loader import leaves
from moebius.errors import USER_ERROR_EXIT, UserError
from moebius.host.topology import format_cpu_list
from moebius.process.operations import LoopWatch, ProcessState
from tests.helpers.checkpoints import TinyMoe

ROOT = Path(__file__).resolve().parents[3]


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a command line."""
    with pytest.raises(SystemExit) as exit_info:
        cli.main(list(arguments))
    captured = capsys.readouterr()
    return int(exit_info.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve"], "MODEL is missing"),
        (["serve", "/no/such/model"], "'/no/such/model': there is no such directory"),
        (["gpu", "/"], "no config.json in it"),
        (["serve", "x", "--port", "http"], "--port: 'http' is not allowed; allowed: an integer"),
        (["serve", "x", "--prot", "1"], "serve has no option --prot; did you mean --port?"),
        (["expert", "x", "--config", "/no.yaml"], "cannot read configuration file /no.yaml"),
        (["chat", "--prompt", "x", "--base-url", "http://127.0.0.1:9"], "cannot reach http://127.0.0.1:9"),
        (["chat", "--base-url", "localhost:8000"], "allowed: http://HOST:PORT or https://HOST:PORT"),
        (["profile", "unix:/no.sock"], "is `moebius serve` or `moebius gpu` running there?"),
        (["chat", "--max-tokens", "many"], "'--max-tokens'"),
        (["bench", "decode", "--streams", "1,none"], "--streams: '1,none' is not allowed"),
        (["sevre"], "sevre is no command; did you mean 'serve', 'sleep'?"),
        (["xyzzy"], "xyzzy is no command; moebius --help lists them"),
        (["models", "pull"], "pull is no command; moebius models --help lists them"),
        (["download", "qwen3"], "download is no command; moebius pull NAME does that"),
        (["launch_server", "x"], "moebius serve MODEL does that"),
        (["help"], "moebius --help does that"),
        (["chat", "qwen3"], "`moebius serve qwen3` starts a model, `moebius chat` then talks to it"),
        (
            ["serve", __file__],
            "this file is not GGUF; allowed: a .gguf file, or the directory of a checkpoint",
        ),
        (["m.gguf"], "m.gguf is no command; moebius serve m.gguf serves a model"),
        (["Qwen/Qwen3-30B-A3B"], "moebius serve Qwen/Qwen3-30B-A3B serves a model"),
    ],
)
def test_user_error_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Every mistake of a user: a non-zero status and exactly one line on stderr that names it."""
    status, out, err = run_cli(capsys, *arguments)
    assert status == 2
    assert err.startswith("moebius: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize("group", ["", "bench", "models", "experts", "keys"])
def test_a_group_alone_lists_its_commands(capsys: pytest.CaptureFixture[str], group: str) -> None:
    """A group lists its commands as `--help` does: what somebody types first is no error."""
    asked = run_cli(capsys, *group.split(), "--help")
    assert run_cli(capsys, *group.split()) == asked
    assert ("\nCommands:\n" if group else "\nServe:\n") in asked[1]


def test_help_lists_every_command_once() -> None:
    """Every command has a heading; a new one without it would be missing in `--help`."""
    shown = [name for names in cli.COMMANDS.values() for name in names]
    assert sorted(shown) == sorted(cli._command("").commands)


def test_a_prompt_may_come_from_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """`moebius run MODEL < question.txt`, as other programs have it; what is no text is refused."""
    for piped, expected in ((b" What is \xc3\xa9? \n", "What is é?"), (b"", "")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped), encoding="ascii"))
        assert _piped() == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(UserError, match="not valid UTF-8"):
        _piped()
    monkeypatch.setattr("sys.stdin", None)  # closed
    assert _piped() == ""


def test_who_finds_no_server_reads_where_one_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A server of this host on another port; of other hosts nothing is said."""
    monkeypatch.setattr("app.supervisor.plan.default_state_dir", lambda: tmp_path)
    for asked, hint in (
        ("127.0.0.1:9", "is `moebius serve` running there?"),
        ("127.0.0.1:9", "port 81 and 900"),
    ):
        assert run_cli(capsys, "chat", f"http://{asked}")[2].endswith(f"{hint}\n")
        for port in (81, 900):
            (tmp_path / f"serve-{port}").mkdir(exist_ok=True)
            (tmp_path / f"serve-{port}" / "gpu.sock").touch()
    assert "port 81" not in run_cli(capsys, "top", "http://moebius.invalid:9")[2]


def test_defects_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unforeseen error is not dressed up as the user's mistake."""

    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_run", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["version"])


def test_serve_has_one_flag_per_leaf(capsys: pytest.CaptureFixture[str]) -> None:
    """`moebius serve --help-all` lists every leaf of the tree, `--help` the two dozen that people need."""
    status, out, _ = run_cli(capsys, "serve", "--help-all")
    short = run_cli(capsys, "serve", "--help")[1]
    assert (status, short.count("\n") < 90, "further settings: moebius serve --help-all" in short) == (
        0,
        True,
        True,
    )
    assert [name for name in cli.USUAL_SETTINGS if f"--{name.replace('_', '-')} " not in short] == []
    words = set(out.replace("/", " ").split())
    assert [leaf.flag for leaf in leaves() if leaf.name != "model" and leaf.flag not in words] == []


@pytest.mark.parametrize("command", ["gateway", "gpu"])
def test_processes_alone_have_the_flags_of_images(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The gateway refuses by them, the engine decodes by them: both receive the same limits."""
    _, out, _ = run_cli(capsys, command, "--help-all")
    words = set(out.split())
    assert [leaf.flag for leaf in leaves() if leaf.section == "images" and leaf.flag not in words] == []


@pytest.mark.parametrize("command", [["--help"], ["gpu", "--help"], ["bench", "decode", "--help"]])
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    """`--help` answers without importing torch, transformers, grpc or the kernels."""
    program = f"""
import sys
from app.cli import main
try:
    main({command!r})
except SystemExit:
    pass
heavy = {{"torch", "transformers", "grpc", "fastapi", "moebius._kernels", "numpy"}} & set(sys.modules)
print(sorted(heavy), file=sys.stderr)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stderr.strip().splitlines()[-1] == "[]"
    assert "Usage: moebius" in result.stdout


WITHOUT_TORCH = """
import json, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTorch())
from app.cli import main
for command in json.loads(sys.argv[1]):
    try:
        main(command)
    except SystemExit as end:
        print(f"ended: {command[0]} {end.code}", file=sys.stderr, flush=True)
"""


def test_a_gpu_that_is_not_there_is_refused_before_anything_loads(tmp_path: Path) -> None:
    """Every command that runs an engine says in its first second that `--device cuda` has no device: before
    it imports torch, reads a checkpoint or starts a process. `plan` may plan with another machine's GPU, and
    `doctor` says all that is wrong."""
    program = f"""
import contextlib, sys
from pathlib import Path
import typer.main
from app import cli, cli_options
cli_options.DEVICES = Path({str(tmp_path)!r})
def commands(command, *words):
    for name, each in getattr(command, "commands", {{}}).items():
        yield from commands(each, *words, name)
    if {{"--config", "--device"}} <= {{name for option in command.params for name in option.opts}}:
        takes = [each.name for each in command.params if each.param_type_name == "argument"]
        yield [*words, *("x" for _ in takes)]
for words in commands(typer.main.get_command(cli.app)):
    if words[0] not in ("plan", "doctor"):
        print(*words, file=sys.stderr)
        with contextlib.suppress(SystemExit):
            cli.main([*words, "--device", "cuda"])
heavy = {{"torch", "transformers", "grpc", "fastapi", "moebius._kernels", "numpy"}} & set(sys.modules)
print(sorted(heavy))
"""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = run.stderr.splitlines()
    names, errors = lines[::2], lines[1::2]
    assert {"serve x", "gpu x", "ranks x", "run x x", "demo", "verify x", "bench engine x"} <= set(names)
    assert [error for error in errors if "--device cuda: there is no NVIDIA GPU here" not in error] == []
    assert run.stdout.strip() == "[]"


def test_lists_of_commands_are_whole_sentences() -> None:
    """What `-h` says of each command fits on its line of 80 columns: none ends in dots."""

    def said(command: Any) -> Iterator[str]:
        for name, below in getattr(command, "commands", {}).items():
            yield f"{name}: {below.get_short_help_str(64)}"
            yield from said(below)

    assert [line for line in said(typer.main.get_command(cli.app)) if line.endswith("...")] == []


def test_commands_without_torch(tmp_path: Path) -> None:
    """What does not compute with torch works where it is not installed; what does says so in one line."""
    model, unused = str(tmp_path / "model"), "http://127.0.0.1:9"
    works = [["models", "random", model, "--shape", "tiny", "--layers", "1"], ["version"], ["topology"]]
    alone = [["chat", "--base-url", unused, "--prompt", "hi"], ["bench", "decode", "--base-url", unused]]
    alone += [["experts", "record", "stop", "--engine-address", f"unix:{tmp_path}/none"]]
    needs = [["plan", model], ["verify", model], ["gpu", model]]
    commands = [*works, *alone, *needs]
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)], cwd=ROOT, capture_output=True, text=True
    )
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith(("ended:", "moebius: error:"))]
    statuses = [int(line.split()[-1]) for line in lines if line.startswith("ended:")]
    assert statuses == [0] * len(works) + [2] * (len(alone) + len(needs)), result.stderr
    errors = [line for line in lines if line.startswith("moebius: error:")]
    assert ["cannot reach" in error for error in errors] == [True] * len(alone) + [False] * len(needs)
    assert ["needs torch" in error for error in errors] == [False] * len(alone) + [True] * len(needs)


WITHOUT_TRANSFORMERS = """
import asyncio, json, sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
class NoTransformers:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTransformers())
import expert_service.main, gateway.main, gateway.prompts.worker
from gateway.text.tokenizer import Tokenizer
from gpu_service import main
from gpu_service.vision.processor import ImagePreparer
from app.cli import main as cli
from moebius.config.loader import load_config
from moebius.errors import UserError
model = sys.argv[1]
try:
    cli(["models", "random", model, "--shape", "tiny", "--layers", "1"])
except SystemExit as end:
    assert not end.code
Tokenizer.from_dir(Path(model), "")
config = load_config(None, {"model": model, "device": "cpu", "expert_transport": "local", "num_pages": 64})
built, *_ = main._load(config)
print("a step was computed")
built.close()
from gpu_service.models.vision.registry import build_tower
try:
    build_tower(built.model_config, model, "meta")
except UserError as error:
    print(error)
"""


def test_text_models_start_without_transformers(tmp_path: Path) -> None:
    """Loading and warming up a text model never asks for it; a tower says what to install."""
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS, str(tmp_path / "model")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    lines = result.stdout.splitlines()
    assert "a step was computed" in lines, result.stderr
    assert "pip install 'moebius[vision]'; or set language_model_only: true" in lines[-1]


def test_the_engines_loop_is_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpu_service serves gRPC on uvloop, as gateway serves HTTP."""
    from gpu_service import main as gpu

    async def serve(config: MoebiusConfig, state: ProcessState, watch: LoopWatch) -> tuple[int, bool]:
        return 0, type(asyncio.get_running_loop()).__module__ == "uvloop"

    monkeypatch.setattr(gpu, "_serve", serve)
    assert gpu._run(MoebiusConfig(), ProcessState(), LoopWatch(1.0)) == (0, True)


def test_examples_name_the_real_server() -> None:
    """The examples carry the port and model given, and a place for the key only when one is needed."""
    text = examples("http://127.0.0.1:8123", "my-model", needs_key=False)
    assert "curl http://127.0.0.1:8123/v1/chat/completions" in text
    assert "Authorization" not in text
    body = text.split("-d '")[1].split("'\n")[0]
    assert json.loads(body)["model"] == "my-model"
    python = text[text.index("from openai") :]
    compile(python, "example", "exec")
    assert 'base_url="http://127.0.0.1:8123/v1"' in python
    assert "Bearer" in examples("http://h:1", "m", needs_key=True)


@pytest.mark.parametrize(
    ("cpus", "text"), [((), "none"), ((3,), "3"), ((0, 1, 2, 3, 8), "0-3,8"), ((9, 5, 4), "4-5,9")]
)
def test_cpu_ranges(cpus: tuple[int, ...], text: str) -> None:
    """CPU lists are printed in the notation of sysfs."""
    assert format_cpu_list(cpus) == text


EXPERT_ALONE = """
import sys
from moebius.__main__ import direct
run = direct(["expert", "--config", sys.argv[1]])
assert run is not None
try:
    run()
except Exception as error:
    print(error)
slow = ("typer", "httpx", "prometheus_client", "moebius.models.read")
print([name for name in slow if name in sys.modules])
"""


def test_an_expert_server_of_the_supervisor_loads_no_command_line(tmp_path: Path) -> None:
    """A server that was killed is waited for: it imports what it needs, and ends by the same errors."""
    model = TinyMoe().write(tmp_path / "model")
    settings = tmp_path / "expert.yaml"
    address = f"unix:{tmp_path}/none/socket"  # refused only once everything else was imported
    settings.write_text(f"model: {{model: {model}}}\nexperts: {{expert_address: '{address}'}}\n")
    command = [sys.executable, "-c", EXPERT_ALONE, str(settings)]
    printed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert printed[-2].startswith("cannot listen on")
    # The geometry, without a predecessor that noted it.
    assert printed[-1] == "['moebius.models.read']"


def test_an_expert_server_starts_without_what_reads_checkpoints() -> None:
    """One that takes its predecessor's experts over reads no checkpoint; how is half of all imports."""
    script = "import sys, expert_service.main; print([n for n in sys.modules if n in sys.argv[1:]])"
    slow = ["moebius.models.registry", "moebius.models.read", "moebius.models.served"]
    slow += ["expert_service.loader"]
    done = subprocess.run([sys.executable, "-c", script, *slow], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_what_the_supervisor_writes_goes_past_the_command_line() -> None:
    """Options, other commands and help are the command line's."""
    for words in (
        "expert --help",
        "expert /model",
        "expert --config f --isa x",
        "serve --config f",
        "expert",
        "",
    ):
        assert direct(words.split()) is None
    failed = [sys.executable, "-m", "moebius", "expert", "--config", "/none.yaml"]
    ended = subprocess.run(failed, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == USER_ERROR_EXIT
    assert (
        ended.stderr
        == "moebius: error: cannot read configuration file /none.yaml: No such file or directory\n"
    )
