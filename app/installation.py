"""How this Moebius was installed, and the command that installs another version in its place."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from moebius import __version__
from moebius.errors import UserError

_NAME = "moebius"
_WHEEL = re.compile(r"moebius-([^-]+)-cp(\d)(\d+)-[^-]+-[^-]+\.whl")
_EXTRAS = re.compile(r"(.*?)(\[[a-z, ]+\])?")
# Where deploy/Dockerfile.* install it.
_IMAGE_PREFIX = Path("/opt/moebius")


@dataclass(frozen=True)
class Installation:
    """What runs this command; filled by `installation`."""

    kind: Literal["clone", "pipx", "uv", "pip", "image"]
    # A clone's directory, or the URL that was installed; empty: it came from a package index.
    origin: str
    version: str = __version__

    def __str__(self) -> str:
        if self.kind == "clone":
            return f"moebius {self.version}, from the clone {self.origin}"
        if self.kind == "image":
            return f"moebius {self.version}, in a container image"
        names = {"pipx": "pipx", "uv": "uv tool", "pip": "pip"}
        return (
            f"moebius {self.version}, installed by {names[self.kind]} from {self.origin or 'a package index'}"
        )


@dataclass(frozen=True)
class Wheel:
    """A file that is to be installed; filled by `read_wheel`."""

    path: Path
    extras: str  # [gpu,vision]; empty: none
    version: str

    def __str__(self) -> str:
        return f"{self.path}{self.extras}"


def installation(prefix: Path = Path(sys.prefix), direct_url: str | None = None) -> Installation:
    """Returns how the program below `prefix` was installed.

    `direct_url`: what pip, pipx and uv note of a file or directory (PEP 610); None: it is read.
    """
    if direct_url is None:
        direct_url = _direct_url()
    if direct_url is None:
        return Installation("clone", str(Path(__file__).resolve().parents[1]))
    origin = json.loads(direct_url or "{}")
    url = str(origin.get("url", ""))
    if origin.get("dir_info", {}).get("editable"):
        return Installation("clone", unquote(urlsplit(url).path))
    if prefix == _IMAGE_PREFIX:
        return Installation("image", url)
    if (prefix / "uv-receipt.toml").is_file():
        return Installation("uv", url)
    if (prefix / "pipx_metadata.json").is_file():
        return Installation("pipx", url)
    return Installation("pip", url)


def _direct_url() -> str | None:
    """Returns the note; empty: installed without one, None: not installed at all."""
    try:
        return importlib.metadata.distribution(_NAME).read_text("direct_url.json") or ""
    except importlib.metadata.PackageNotFoundError:
        return None


def read_wheel(given: str) -> Wheel:
    """Returns the wheel that `given` names, with extras where it ends in them.

    Raises UserError for a file that is none of ours, or is for another Python.
    """
    match = _EXTRAS.fullmatch(given)
    path, extras = Path(match[1] if match else given).expanduser(), (match[2] if match else "") or ""
    found = _WHEEL.fullmatch(path.name)
    if found is None:
        raise UserError(
            f"{given!r} is no wheel of Moebius; allowed: a file moebius-VERSION-….whl, or with [gpu]"
        )
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    python = f"{found[2]}.{found[3]}"
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    if python != own:
        allowed = f"a wheel for cp{own.replace('.', '')}"
        raise UserError(f"{path} is for Python {python}, and this is Python {own}; allowed: {allowed}")
    return Wheel(path.absolute(), extras, found[1])


def update_command(found: Installation, wheel: Wheel | None) -> list[str]:
    """Returns the words of the command that replaces this version, of the program that installed it.

    `wheel`: None: the newest one of the package index. Raises UserError, with what to do, for an installation
    that only its owner can replace, and where a file was installed and none is given.
    """
    if found.kind == "clone":
        raise UserError(
            f"{found}: a clone is left alone; in it, `git pull` and `make setup` bring the next version"
        )
    if found.kind == "image":
        raise UserError(f"{found}: start a container of a newer image, or `helm upgrade` the release")
    if wheel is None and found.origin:
        raise UserError(
            f"{found}; Moebius is in no public package index: `moebius update FILE.whl` installs a newer "
            "wheel"
        )
    what = str(wheel) if wheel else _NAME
    if found.kind == "pipx":
        return ["pipx", "install", "--force", what] if wheel else ["pipx", "upgrade", what]
    if found.kind == "uv":
        return ["uv", "tool", "install", "--force", what] if wheel else ["uv", "tool", "upgrade", what]
    if importlib.util.find_spec("pip") is None:
        return ["uv", "pip", "install", "--python", sys.executable, "--upgrade", what]
    return [sys.executable, "-P", "-m", "pip", "install", "--upgrade", what]
