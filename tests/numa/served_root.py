"""The disk of the guest of `served_guest.py`: this Python, its packages, our code and the demo model.

usage: python -m tests.numa.served_root IMAGE
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import cache_from_source
from pathlib import Path

from packaging.requirements import Requirement

from tests.helpers.chart import ROOT
from tests.helpers.demo import demo_checkpoint

PACKAGES = ("moebius", "app", "gateway", "gpu_service", "expert_service", "protos")
GUEST = Path(__file__).with_name("served_guest.py")
LINKER = Path("/lib64/ld-linux-x86-64.so.2")
MODEL = "root/.cache/moebius"
FREE_BYTES = 256 << 20


def needed_distributions(
    name: str, known: dict[str, metadata.Distribution], extras: Iterable[str] = ()
) -> None:
    """Adds what `pip install NAME[EXTRAS]` brings, by name."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in known and not extras:
        return
    known[key] = metadata.distribution(name)
    for text in known[key].requires or ():
        needed, chosen = Requirement(text), ("", *extras)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in chosen):
            needed_distributions(needed.name, known, needed.extras)


def copy_packages(site: Path) -> None:
    """Everything that our package depends on, but not the package."""
    known: dict[str, metadata.Distribution] = {}
    needed_distributions("moebius", known)
    for distribution in known.values():
        for file in distribution.files or ():
            source = Path(str(distribution.locate_file(file)))
            own = file.parts[0] == "moebius" and distribution.name == "moebius"
            if (
                source.is_file()
                and ".." not in file.parts
                and not own
                and file.suffix not in (".a", ".h", ".hpp")
            ):
                _copy(source, site / file)


def copy_python(tree: Path) -> None:
    """Interpreter and standard library, where they are on this machine."""
    skipped = shutil.ignore_patterns(
        "site-packages", "dist-packages", "test", "tests", "idlelib", "*.a", "config-*"
    )
    for place in {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}:
        shutil.copytree(place, tree / str(place).lstrip("/"), ignore=skipped, dirs_exist_ok=True)
    interpreter = Path(sys.executable).resolve()
    _copy(interpreter, tree / str(interpreter).lstrip("/"))


def libraries(files: Iterable[Path]) -> Iterator[Path]:
    """Yields the system's shared libraries that binaries ask for."""
    text = subprocess.run(["ldd", *files], capture_output=True, text=True, check=False).stdout
    for name in sorted(set(re.findall(r"=> (/\S+)", text))):
        yield Path(name)


def copy_libraries(tree: Path) -> None:
    """Copies the libraries of all binaries copied so far that are not there yet."""
    binaries = [path for path in tree.rglob("*.so*") if path.is_file()]
    binaries.append(tree / str(Path(sys.executable).resolve()).lstrip("/"))
    for library in libraries(binaries):
        if not library.is_relative_to(tree):
            _copy(library, tree / str(library).lstrip("/"))
    _copy(LINKER, tree / "lib64" / LINKER.name)
    if not (tree / "lib").exists():
        (tree / "lib").symlink_to("usr/lib")


def make_root(tree: Path) -> None:
    """All files of the guest."""
    copy_python(tree)
    copy_packages(tree / "site")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / "src" / package)
    shutil.copytree(demo_checkpoint(), tree / MODEL / demo_checkpoint().name)
    for place in ("proc", "sys", "dev", "tmp", "etc"):
        (tree / place).mkdir(exist_ok=True)
    (tree / "etc" / "hosts").write_text("127.0.0.1 localhost\n")
    (tree / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    _copy(GUEST, tree / "guest.py")
    copy_libraries(tree)


def make_image(image: Path) -> None:
    """An ext4 file system in a file, without privileges. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(dir=image.parent) as directory:
        tree = Path(directory) / "root"
        tree.mkdir()
        make_root(tree)
        nbytes = sum(path.lstat().st_size + 4096 for path in tree.rglob("*"))
        image.unlink(missing_ok=True)
        size = f"{(nbytes + FREE_BYTES) * 11 // 10 >> 10}k"
        command = ["mke2fs", "-q", "-t", "ext4", "-d", str(tree), str(image), size]
        subprocess.run(command, check=True, env={"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"})


def _copy(source: Path, target: Path) -> None:
    """With its times, by which Python knows compiled modules: an emulated CPU compiles torch for minutes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    if source.suffix == ".py":
        compiled = Path(cache_from_source(source))
        if compiled.is_file():
            _copy(compiled, Path(cache_from_source(target)))


if __name__ == "__main__":
    make_image(Path(sys.argv[1]).absolute())
