"""Guards models by name: only the files that are needed, once, continued where it broke off; clear errors.

Commands run in processes of their own: the hub's library reads its environment when it is imported.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from app.cli import main
from app.commands.models import with_checkpoint
from app.hub import HubModel, chosen_files, hub_model, in_cache
from lab.random_model import RandomModelOptions, write_random_model
from moebius.config import MoebiusConfig
from moebius.errors import UserError
from tests.helpers.hub_server import HubServer, hub_server
from tests.helpers.warm_processes import run_program

NAME = "someone/tiny-moe"


def moebius(server_url: str, home: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    """Returns a command with that hub: (status, stdout, stderr)."""
    variables = {**os.environ, "HF_ENDPOINT": server_url, "HF_HOME": str(home), "HOME": str(home)}
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        variables.pop(name, None)
    ended = run_program(["-m", "moebius", *arguments], env={**variables, **environment})
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Returns a checkpoint as it is on the hub, with files that are not needed."""
    options = RandomModelOptions("tiny", "bfloat16", 0, 0.0, "none", "random", 0, 1)
    written = write_random_model(tmp_path_factory.mktemp("hub") / "model", options, lambda done, total: None)
    found = {path.name: path.read_bytes() for path in written.path.iterdir() if path.is_file()}
    extra = {
        "README.md": b"#",
        "modeling.py": b"x",
        "pytorch_model.bin": b"p",
        "original/model.safetensors": b"o",
    }
    return {**found, **extra}


def fetch(server: HubServer, home: Path, *more: str, **environment: str) -> tuple[int, str, str]:
    """`moebius models fetch` of the repository."""
    return moebius(server.url, home, "models", "fetch", NAME, *more, **environment)


def test_needed_files_once_and_offline(files: dict[str, bytes], tmp_path: Path) -> None:
    """Weights, configuration and tokenizer come, nothing else, and not again, also without the hub."""
    with hub_server({NAME: files}) as server:
        status, out, err = fetch(server, tmp_path)
        assert status == 0, err
        place = Path(out.strip())
        needed = {
            name for name in files if "/" not in name and name.endswith((".safetensors", ".json", ".jinja"))
        }
        assert needed <= {path.name for path in place.iterdir()} == set(server.sent)
        assert not {"README.md", "modeling.py", "pytorch_model.bin", "original/model.safetensors"} & set(
            server.sent
        )
        sent = dict(server.sent)
        assert fetch(server, tmp_path)[1] == out
        assert server.sent == sent
    assert fetch(server, tmp_path)[:2] == (0, out), "the hub is gone, the files are not"
    assert fetch(server, tmp_path, "--offline")[1] == out
    status, _, err = fetch(server, tmp_path / "elsewhere")
    assert (status, err.count("\n")) == (2, 1)
    assert "cannot be reached" in err
    assert "give the directory of a copy as MODEL" in err


def test_what_can_not_be_served_is_refused_before_its_weights_are_downloaded(tmp_path: Path) -> None:
    """Hundreds of gigabytes would come for nothing."""
    config = json.dumps({"model_type": "deepseek_v5", "text_config": {"hidden_size": 5120}}).encode()
    with hub_server({NAME: {"config.json": config, "model.safetensors": b"w" * 1000}}) as server:
        for arguments in (("serve", NAME), ("models", "fetch", NAME)):
            status, _, err = moebius(server.url, tmp_path, *arguments)
            assert status == 2
            # Before it there may be a line about the download.
            refusal = err.splitlines()[-1]
            assert "'deepseek_v5' is not supported" in refusal
        assert set(server.sent) == {"config.json"}


def test_a_download_that_broke_off_goes_on(files: dict[str, bytes], tmp_path: Path) -> None:
    """Bytes that came are not fetched again, by the library's retries or by the next command."""
    weights = os.urandom(24 << 20)  # more than the library writes at once
    repository = {"config.json": files["config.json"], "model.safetensors": weights}
    with hub_server({NAME: repository}) as server:
        server.breaks_after["model.safetensors"] = 22 << 20
        status, out, err = fetch(server, tmp_path)
        if status != 0:
            assert "goes on where it stopped" in err
            status, out, err = fetch(server, tmp_path)
        assert status == 0, err
        assert (Path(out.strip()) / "model.safetensors").read_bytes() == weights
        assert server.sent["model.safetensors"] < 1.2 * len(weights)


def test_the_plan_needs_no_weights(files: dict[str, bytes], tmp_path: Path) -> None:
    """What a model takes can be asked before hundreds of gigabytes are downloaded."""
    with hub_server({NAME: files}) as server:
        status, out, err = moebius(server.url, tmp_path, "plan", NAME)
        assert status == 0, err
        assert "KV cache" in out
        assert out.startswith(f"{NAME.partition('/')[2]} (")
        assert not [name for name in server.sent if name.endswith(".safetensors")]


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Returns one model as two GGUF files of different size, with data that is much longer than a header."""
    directory, found = tmp_path_factory.mktemp("quantised"), {}
    for kind, layers in (("Q4_0", 30), ("Q5_0", 60)):
        options = RandomModelOptions("small", "q4_0", layers)
        written = write_random_model(directory / kind, options, lambda done, total: None)
        [file] = written.path.parent.glob("*.gguf") if written.path.is_file() else written.path.glob("*.gguf")
        found[f"small-{kind}.gguf"] = file.read_bytes()
    return found


def test_quantisations_are_compared_by_their_headers(quantised: dict[str, bytes], tmp_path: Path) -> None:
    """Every GGUF file of a repository is a row, from its first bytes, as if the file were here."""
    target, file = tmp_path / "plans.json", tmp_path / "small-Q5_0.gguf"
    hardware = ("--gpus", "none", "--ram", "64", "--cores", "16")
    with hub_server({NAME: quantised}) as server:
        status, out, err = moebius(server.url, tmp_path, "plan", NAME, *hardware, "--json", str(target))
        assert status == 0, err
        assert server.sent.keys() == quantised.keys()
        assert all(sent < len(quantised[name]) / 2 for name, sent in server.sent.items())
        one = moebius(server.url, tmp_path, "plan", f"{NAME}:Q4_0", *hardware)
        assert (one[0], "KV cache: " in one[1]) == (0, True), one
    rows = {row["name"]: row for row in json.loads(target.read_text())["rows"]}
    assert rows.keys() == {"Q4_0", "Q5_0"}
    assert f"moebius serve {NAME}:Q5_0" in out, "the largest that is fast enough"
    file.write_bytes(quantised[file.name])
    alone = tmp_path / "alone.json"
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(file), *hardware, "--json", str(alone)])
    assert not ended.value.code
    assert json.loads(alone.read_text())["components"] == rows["Q5_0"]["plan"]["components"]
    assert rows["Q5_0"]["file_bytes"] == len(quantised[file.name])


@pytest.mark.parametrize("what", ["unknown", "private", "gated", "revision"])
def test_refusals_are_one_line(what: str, files: dict[str, bytes], tmp_path: Path) -> None:
    """No such model, one that needs a token, conditions, or another revision: what to do is said."""
    expected = {
        "unknown": "no such model at",
        "private": "needs HF_TOKEN",
        "gated": "accept its conditions at",
        "revision": "has no revision 'v9'",
    }
    with hub_server({} if what == "unknown" else {NAME: files}) as server:
        server.token = "secret" if what == "private" else ""
        server.gated = what == "gated"
        status, out, err = fetch(server, tmp_path, *(["--revision", "v9"] if what == "revision" else []))
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert expected[what] in err
        if what == "private":
            assert fetch(server, tmp_path, HF_TOKEN="secret")[0] == 0


GGUF = [
    "model-Q4_K_M.gguf",
    "model-Q8_0-00001-of-00002.gguf",
    "model-Q8_0-00002-of-00002.gguf",
    "mmproj-F16.gguf",
]


@pytest.mark.parametrize(
    ("quantisation", "chosen"),
    [("", GGUF[:1]), ("q8_0", GGUF[1:3])],
)
def test_one_quantisation_is_chosen(quantisation: str, chosen: list[str]) -> None:
    """The quantisation of a GGUF repository that is named is taken with all its parts, else the usual one."""
    assert chosen_files(HubModel("a/b", quantisation), GGUF) == chosen


def test_a_choice_is_asked_for() -> None:
    """Where there is no usual one, or not the one that is wanted, the names are listed."""
    with pytest.raises(UserError, match=r"a/b has no Q2_K: give one as a/b:NAME, of Q4_K_M, Q8_0"):
        chosen_files(HubModel("a/b", "Q2_K"), GGUF)
    with pytest.raises(UserError, match="several quantisations"):
        chosen_files(HubModel("a/b", ""), ["m-Q3_K.gguf", "m-Q5_K.gguf"])
    with pytest.raises(UserError, match="neither safetensors nor GGUF"):
        chosen_files(HubModel("a/b", ""), ["config.json", "pytorch_model.bin"])


def test_paths_into_the_cache(files: dict[str, bytes], tmp_path: Path) -> None:
    """What other programs have downloaded is served by the path where it lies, under its name on the hub."""
    repository = tmp_path / "models--owner--some--name"
    for version in ("abc", "def"):
        (repository / "snapshots" / version).mkdir(parents=True)
        (repository / "snapshots" / version / "config.json").write_bytes(files["config.json"])
    assert in_cache(repository) == (repository, "")  # which one is not said
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("def")
    for given, version in ((repository, "def"), (repository / "snapshots" / "abc", "abc")):
        model = MoebiusConfig().model.model_copy(update={"model": str(given)})
        found = with_checkpoint(MoebiusConfig().model_copy(update={"model": model})).model
        assert found.model == str(repository / "snapshots" / version)
        assert found.served_model_name == "owner/some--name"
    assert in_cache(tmp_path) == (tmp_path, "")


def test_paths_and_names_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What exists is a path; ./x, /x, ~/x, x.gguf and a name without an owner never go to the hub."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    for given in ("owner/name", "./a/b", "/a/b", "~/b", "a/b.gguf", "name", "a/b/c"):
        assert hub_model(given) is None, given
    assert hub_model("Qwen/Qwen3-30B-A3B") == HubModel("Qwen/Qwen3-30B-A3B", "")
    assert hub_model("unsloth/x-GGUF:UD-Q4_K_XL") == HubModel("unsloth/x-GGUF", "UD-Q4_K_XL")
