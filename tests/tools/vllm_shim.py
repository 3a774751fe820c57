"""A pytest plugin with which vLLM's tests of its HTTP server meet ours (`tests.tools.vllm_entrypoints`).

vLLM's package is not there: whatever the tests import of it is a stand-in, but for the tokenizer. Their
helper that starts a server hands out the one that runs already, under any model name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import openai
import pytest
from transformers import AutoTokenizer

URL = os.environ["MOEBIUS_URL"]
TOKENIZER = os.environ["MOEBIUS_TOKENIZER"]
_ROOTS = ("vllm", "pybase64")
# What a server that was started with these would do differently, which ours is not asked to.
_OTHER_SERVERS = (
    "--enable-lora",
    "--lora-modules",
    "--uds",
    "--root-path",
    "--enable-prompt-embeds",
    "--runner",
)


class _Exception(Exception):
    """Stands for all of vLLM's exceptions."""


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.endswith(("Error", "Exception")):
            return _Exception
        if name == "get_tokenizer":
            return lambda *_args, **_kwargs: _tokenizer(TOKENIZER)
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
    """The server that runs, in the place of one that vLLM's helper would start."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **_options: Any) -> None:
        others = [flag for flag in vllm_serve_args if flag in _OTHER_SERVERS]
        if others:
            pytest.skip(f"needs a server with {others[0]}")
        self.model = model

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    @property
    def url_root(self) -> str:
        """Without a path."""
        return URL

    def url_for(self, *parts: str) -> str:
        """A path of it."""
        return "/".join((URL, *parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client."""
        settings = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return openai.OpenAI(**{**settings, "timeout": 120, **options})

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """OpenAI's client."""
        settings = {"base_url": self.url_for("v1"), "api_key": self.DUMMY_API_KEY, "max_retries": 0}
        return openai.AsyncOpenAI(**{**settings, "timeout": 120, **options})

    def get_client_anthropic(self, **options: Any) -> Any:
        """Anthropic's client."""
        import anthropic

        return anthropic.Anthropic(base_url=URL, api_key=self.DUMMY_API_KEY, max_retries=0, **options)

    def get_async_client_anthropic(self, **options: Any) -> Any:
        """Anthropic's client."""
        import anthropic

        return anthropic.AsyncAnthropic(base_url=URL, api_key=self.DUMMY_API_KEY, max_retries=0, **options)


_from_pretrained = AutoTokenizer.from_pretrained


def _tokenizer(_name: str, **_options: Any) -> Any:
    """The served model's, whichever is asked for."""
    return _from_pretrained(TOKENIZER)


def _install() -> None:
    sys.meta_path.insert(0, _Finder())
    AutoTokenizer.from_pretrained = _tokenizer  # type: ignore[method-assign]
    utils, conftest = ModuleType("tests.utils"), _Module("tests.conftest")
    utils.RemoteOpenAIServer = RemoteOpenAIServer  # type: ignore[attr-defined]
    utils.__dict__.setdefault("__getattr__", lambda name: MagicMock(name=name))
    sys.modules["tests.utils"], sys.modules["tests.conftest"] = utils, conftest


_install()


@pytest.fixture
def local_asset_server() -> Any:
    """Stands for one of pictures, which no test here needs."""
    return MagicMock()
