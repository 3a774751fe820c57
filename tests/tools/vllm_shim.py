"""A pytest plugin with which vLLM's tests of its HTTP server meet ours (`tests.tools.vllm_entrypoints`).

vLLM's package is not there: whatever the tests import of it is a stand-in, but for the tokenizer. Their
helper that starts a server starts one of `tests.tools.vllm_servers`, or hands out one that runs already.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import openai
import pytest
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = os.environ["MOEBIUS_TOKENIZER"]
TIMEOUT_S = 600  # of a request; the host may have more to do
_ROOTS = ("vllm", "pybase64")
# What a server that was started with these would do differently, which ours is not asked to.
_OTHER_SERVERS = (
    "--uds",
    "--root-path",
    "--enable-prompt-embeds",
    "--runner",
    "--watermark-config",
    "--return-tokens-as-token-ids",
)
# Whose model has to think or to call tools by itself, which the demo model does not.
_SERVERS = {
    "test_thinking_token_budget.py": "thoughts",
    "test_completion_with_function_calling.py": "rules",
    "test_include_reasoning.py": "rules",
    "openai/responses/": "rules",
    "anthropic/test_messages.py": "rules",
}
# Tests that count what a server did want one that has done nothing.
_FRESH = "test_metrics.py"


def _start(kind: str) -> tuple[str, subprocess.Popen[str]]:
    """Returns the URL of a new server, which ends with this process at the latest."""
    command = [sys.executable, "-m", "tests.tools.vllm_servers", kind]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    atexit.register(process.terminate)
    assert process.stdout is not None
    url = next((line.strip() for line in process.stdout if line.startswith("http")), "")
    assert url, f"the server did not start: {' '.join(command)}"
    return url, process


@functools.cache
def _shared(kind: str) -> str:
    return _start(kind)[0]


def _kind() -> str:
    """Returns which of our servers the running test talks to."""
    test = os.environ["PYTEST_CURRENT_TEST"]
    return next((kind for file, kind in _SERVERS.items() if file in test), "demo")


def pytest_configure(config: pytest.Config) -> None:
    """Loads the fixtures of the entrypoints' own tests; those above them need vLLM."""
    folder = Path(config.rootpath) / "tests" / "entrypoints"
    for number, file in enumerate((folder / "conftest.py", folder / "openai" / "responses" / "conftest.py")):
        spec = importlib.util.spec_from_file_location(f"vllm_fixtures_{number}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config.pluginmanager.register(module)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what needs another model: LoRA adapters, images."""
    for item in items:
        values = [str(value) for value in getattr(getattr(item, "callspec", None), "params", {}).values()]
        if any(value.endswith("-lora") for value in values):
            item.add_marker(pytest.mark.skip("needs a LoRA adapter"))
        if "multimodal" in values:
            item.add_marker(pytest.mark.skip("needs a model that sees"))


class _Exception(Exception):
    """Stands for all of vLLM's exceptions."""


class _ModelConfig:
    """What tests ask vLLM about a model, answered of the served one."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        pass

    def get_vocab_size(self) -> int:
        """Returns the number of columns of the logits."""
        return int(json.loads((Path(TOKENIZER) / "config.json").read_text())["vocab_size"])


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith(("Error", "Exception")):
            return _Exception
        if name == "get_tokenizer":
            return lambda *_args, **_kwargs: _tokenizer(TOKENIZER)
        if name == "download_weights_from_hf":
            return lambda model, **_options: model
        if name == "ModelConfig":
            return _ModelConfig
        if name == "__version__":
            return "0"
        return MagicMock(name=f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a stand-in of every module of a package that is not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] in _ROOTS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class RemoteOpenAIServer:
    """One of our servers, in the place of one that vLLM's helper would start."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **_options: Any) -> None:
        others = [flag for flag in vllm_serve_args if flag in _OTHER_SERVERS]
        if others:
            pytest.skip(f"needs a server with {others[0]}")
        self.model = model
        self._own: subprocess.Popen[str] | None = None
        kind = _kind()
        if _FRESH in os.environ["PYTEST_CURRENT_TEST"]:
            self.url_root, self._own = _start(kind)
        else:
            self.url_root = _shared(kind)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._own is not None:
            self._own.terminate()
            self._own.wait(60)

    def url_for(self, *parts: str) -> str:
        """Returns a path of it."""
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client."""
        settings = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return openai.OpenAI(**{**settings, "timeout": TIMEOUT_S, **options})

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """OpenAI's client."""
        settings = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return openai.AsyncOpenAI(**{**settings, "timeout": TIMEOUT_S, **options})

    def get_client_anthropic(self, **options: Any) -> Any:
        """Anthropic's client."""
        import anthropic

        return anthropic.Anthropic(
            base_url=self.url_root,
            api_key=self.DUMMY_API_KEY,
            max_retries=0,
            **{"timeout": TIMEOUT_S, **options},
        )

    def get_async_client_anthropic(self, **options: Any) -> Any:
        """Anthropic's client."""
        import anthropic

        return anthropic.AsyncAnthropic(
            base_url=self.url_root,
            api_key=self.DUMMY_API_KEY,
            max_retries=0,
            **{"timeout": TIMEOUT_S, **options},
        )


_from_pretrained = AutoTokenizer.from_pretrained


def _tokenizer(_name: str, **_options: Any) -> Any:
    """Returns the served model's, whichever is asked for."""
    return _from_pretrained(TOKENIZER)


def _install() -> None:
    sys.meta_path.insert(0, _Finder())
    AutoTokenizer.from_pretrained = _tokenizer  # type: ignore[assignment, method-assign]
    utils, conftest = ModuleType("tests.utils"), _Module("tests.conftest")
    utils.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
    utils.ROCM_EXTRA_ARGS = []  # type: ignore[attr-defined]
    utils.multi_gpu_only = lambda **_options: pytest.mark.skip("needs several GPUs")  # type: ignore[attr-defined]
    utils.requires_fp8 = lambda test: test  # type: ignore[attr-defined]
    utils.__dict__.setdefault("__getattr__", lambda name: MagicMock(name=name))
    sys.modules["tests.utils"], sys.modules["tests.conftest"] = utils, conftest


_install()


@pytest.fixture
def local_asset_server() -> Any:
    """Stands for one of pictures, which no test here needs."""
    return MagicMock()
