"""Guards the wording of comments, docstrings and documents: words that the field does not use stay out."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WORDS = re.compile(r"\b(?:nobody|whoever|anew|so many|told|mend(?:s|ed|ing)?)\b", re.IGNORECASE)
# Parts of the names of functions and classes.
IDENTIFIERS = "nobody|whoever|anew|so_many|told|untold|mended|sit_out|lanebooks"
PLACES = (
    "gateway",
    "gpu_service",
    "protos",
    "kernels",
    "expert_service",
    "moebius",
    "app",
    "lab",
    "tests",
    "tools",
    "deploy",
    "k8s",
    "docs",
)
# Places with Python files of ours.
PROGRAMS = [place for place in PLACES if place not in ("protos", "tools", "deploy", "k8s", "docs")]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", ".github")
COMMENTS = re.compile(r"//.*|/\*(?:.|\n)*?\*/")
# Messages as programs write them.
QUOTED = re.compile(r"```.*?```|`[^`]*`|^ {4}[^\n]*$", re.DOTALL | re.MULTILINE)
# "draft tokens", where speculation is meant.
GUESSES = re.compile(r"\bguess(?:es|ed|ing)?\b", re.IGNORECASE)
SPECULATION = (
    "moebius",
    "app",
    "lab",
    "gpu_service",
    "docs/speculation.md",
    "tests/*specul*",
    "tests/*draft*",
    "tests/*mtp*",
)


def python_prose(text: str) -> Iterator[str]:
    """Yields comments and docstrings, those of attributes included."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def prose(path: Path) -> Iterator[str]:
    """Yields the texts of a file that people read: comments of code, all of a document but what it quotes."""
    text = (ROOT / path).read_text(errors="replace")
    if path.suffix in (".py", ".pyi"):
        yield from python_prose(text)
    elif path.suffix in (".cc", ".h", ".js", ".proto"):
        yield from COMMENTS.findall(text)
    elif path.suffix == ".md":
        yield QUOTED.sub("", text)
    elif path.suffix not in (".svg", ".safetensors", ".txt"):
        yield text


def words_in(path: Path, words: re.Pattern[str] = WORDS) -> list[str]:
    """Returns the words of the list in one file, in their order."""
    if not words.search(re.sub(r"\s+", " ", (ROOT / path).read_text(errors="replace"))):
        return []  # as nearly every file has none, which need not be parsed
    return [found.lower() for text in prose(path) for found in words.findall(re.sub(r"\s+", " ", text))]


def private_names(text: str) -> list[str]:
    """Returns the names of functions and classes that are, or contain as a part, a word of the list."""
    if not re.search(IDENTIFIERS, text, re.IGNORECASE):
        return []
    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names = (node.name for node in ast.walk(ast.parse(text)) if isinstance(node, defined))
    return [name for name in names if re.search(rf"(?:^|_)(?:{IDENTIFIERS})(?:_|$)", name, re.IGNORECASE)]


def fragments(text: str) -> list[str]:
    """Returns the docstrings that begin with a preposition and have no subject."""
    if not re.search(r"[\"'](?:Of|As) ", text):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, documented))
    docstrings = (ast.get_docstring(node) or "" for node in nodes)
    return [docstring for docstring in docstrings if docstring.startswith(("Of ", "As "))]


def files(place: str) -> list[str]:
    """Returns tracked files below a folder or of a pattern; an empty place is a mistake of this test."""
    listed = subprocess.run(["git", "ls-files", place], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    assert names, place
    return names


@pytest.mark.parametrize("place", [*PLACES, *PAGES])
def test_words_that_the_field_does_not_use_stay_out(place: str) -> None:
    """A maintainer of another engine reads any page without stopping at a private word."""
    assert {name: found for name in files(place) if (found := words_in(Path(name)))} == {}


@pytest.mark.parametrize("place", PROGRAMS)
def test_names_are_the_fields(place: str) -> None:
    """A function or class is named in words that a maintainer of another engine knows."""
    found = {name: private_names((ROOT / name).read_text()) for name in files(place) if name.endswith(".py")}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize("place", PROGRAMS)
def test_docstrings_have_a_subject(place: str) -> None:
    """A docstring says what the caller gets: it does not begin with "Of" or "As", as a remark on a name."""
    found = {name: fragments((ROOT / name).read_text()) for name in files(place) if name.endswith(".py")}
    assert {name: texts for name, texts in found.items() if texts} == {}


@pytest.mark.parametrize("place", SPECULATION)
def test_draft_tokens_have_one_name(place: str) -> None:
    """A reader who looks for draft tokens, accepted or rejected, finds all that is said of them."""
    assert {name: found for name in files(place) if (found := words_in(Path(name), GUESSES))} == {}


def test_words_are_found_across_lines_and_only_in_prose(tmp_path: Path) -> None:
    """The search reads comments and docstrings, also where a line ends within a word pair; not strings."""
    file = tmp_path / "one.py"
    file.write_text('"""Keeps so\nmany."""\nA = "nobody"  # made anew\n')
    assert words_in(file) == ["anew", "so many"]
    assert private_names("def test_it_harms_nobody(): ...\nclass Folded: ...\n") == ["test_it_harms_nobody"]
    assert fragments('class One:\n    """Of one file."""\n    """As an attribute."""\n') == ["Of one file."]
    assert fragments('"""Often."""\n') == []
    page = tmp_path / "page.md"
    page.write_text("Nobody reads `an expert is packed anew`.\n\n    whoever\n")
    assert words_in(page) == ["nobody"]
