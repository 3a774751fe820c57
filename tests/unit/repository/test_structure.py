"""Guards the shape of the tree: small files, small functions, imports that run in one direction."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SERVICES = {"gateway", "gpu_service", "expert_service"}
SHARED = {"protos", "moebius"}
# From below upward: the roof imports services, measuring imports the roof.
ROOF = ("app", "lab")


@cache
def sources() -> list[Path]:
    """Returns every tracked or new Python and C++ file of the product (not tests, not generated stubs)."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [Path(line) for line in listed.stdout.splitlines()]
    kinds = {".py", ".cc", ".h"}
    return [
        path
        for path in paths
        if path.suffix in kinds
        and path.parts[0] != "tests"
        and "_pb2" not in path.name
        and (ROOT / path).exists()
    ]


@cache
def parsed(path: Path) -> ast.Module:
    """Returns the file's tree, shared by all tests: callers must not change it."""
    return ast.parse((ROOT / path).read_text())


def code_lines(path: Path) -> int:
    """Returns the number of lines that are not blank."""
    return sum(1 for line in (ROOT / path).read_text().splitlines() if line.strip())


def statements(tree: ast.AST, as_run: bool = False) -> Iterator[ast.stmt]:
    """Yields all statements of a tree, parents first, without a look at its expressions: a sixth of the time.

    `as_run`: not what stands under TYPE_CHECKING.
    """
    for block in ("body", "handlers", "cases", "orelse", "finalbody"):
        if as_run and block == "body" and isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.dump(tree.test):
            continue
        for child in getattr(tree, block, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child, as_run)


def imported_packages(tree: ast.AST) -> set[str]:
    """Top-level names of absolute imports anywhere in the file."""
    names: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def imported_modules(tree: ast.AST, as_run: bool = False) -> set[str]:
    """Full names of absolutely imported modules, and of what is imported from them.

    `as_run`: not what stands under TYPE_CHECKING.
    """
    names: set[str] = set()
    for node in statements(tree, as_run):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_files_and_functions_stay_small() -> None:
    """No file above 450 lines, no Python function above 60."""
    sizes = {path: code_lines(path) for path in sources()}
    assert {path: size for path, size in sizes.items() if size > 450} == {}
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    long_functions = [
        f"{path}:{node.name}"
        for path in sizes
        if path.suffix == ".py"
        for node in statements(parsed(path))
        if isinstance(node, functions) and (node.end_lineno or 0) - node.lineno > 60
    ]
    assert long_functions == []


def test_services_never_import_one_another() -> None:
    """Services meet in protos/ and moebius/ only; the gateway never names torch."""
    crossing = []
    for path in sources():
        top = path.parts[0]
        if path.suffix != ".py" or top not in SERVICES:
            continue
        imports = imported_packages(parsed(path))
        forbidden = (SERVICES - {top}) | ({"torch"} if top != "gpu_service" else set())
        crossing += [f"{path} -> {name}" for name in sorted(imports & forbidden)]
    assert crossing == []


def test_own_processes_import_nothing_of_the_working_directory() -> None:
    """Python processes are started with -P or -I: `-m` and `-c` would import a `moebius` folder (a clone of
    this repository) or a `queue.py` of the user's working directory before what is installed."""
    unsafe = []
    for path in sources():
        if path.suffix != ".py" or path.parts[0] not in {*SERVICES, *SHARED, *ROOF}:
            continue
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.List | ast.Tuple) or len(node.elts) < 2:
                continue
            program, first = (ast.unparse(element) for element in node.elts[:2])
            if program == "sys.executable" and first not in ("'-P'", "'-I'"):
                unsafe.append(f"{path}:{node.lineno}")
    assert unsafe == []


def test_only_the_roof_imports_services() -> None:
    """What `moebius/` shares with the services imports none of them; `app` stands above them all, and `lab`
    above `app`, which only registers its commands."""
    upward = []
    for path in sources():
        is_roof = path.parts[0] in ROOF or path == Path("moebius/__main__.py")
        if path.suffix != ".py" or path.parts[0] not in {*SERVICES, *SHARED, *ROOF}:
            continue
        forbidden = set() if is_roof else {*ROOF, *(SERVICES if path.parts[0] == "moebius" else ())}
        if path.parts[0] == "app" and path != Path("app/cli.py"):
            forbidden = {"lab"}
        upward += [f"{path} -> {name}" for name in sorted(imported_packages(parsed(path)) & forbidden)]
    assert upward == []


def import_graph() -> dict[str, set[str]]:
    """Returns each module of the product with the product's modules that it imports, anywhere in the file.

    Not counted are imports under TYPE_CHECKING, which no process ever runs.
    """
    paths = {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__"): path
        for path in sources()
        if path.suffix == ".py"
    }
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        # The longest known name counts: that of a module rather than of the package it is in.
        found = imported_modules(parsed(path), as_run=True)
        longest = {
            name for name in found if not any(other.startswith(f"{name}.") for other in found & paths.keys())
        }
        graph[module] = (longest & paths.keys()) - {module}
    return graph


def import_circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns strongly connected components of more than two modules (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module]:
            if other not in index:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], index[other])
        if low[module] == index[module]:
            begin = stack.index(module)
            component, stack[begin:] = stack[begin:], []
            if len(component) > 2:
                found.append(sorted(component))

    for module in graph:
        if module not in index:
            visit(module)
    return found


def test_imports_run_in_no_circle() -> None:
    """No more than two modules import one another, directly or through others."""
    assert import_circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}}) == [["a", "b", "c"]]
    assert import_circles(import_graph()) == []


def test_models_are_described_without_torch() -> None:
    """What all services share of a model, every family's module included, leaves torch out of the process."""
    program = "import sys, moebius.models.read; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_gateway_process_never_loads_torch() -> None:
    """Importing the whole gateway leaves torch out of the process, transitively too."""
    program = "import sys, gateway.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_expert_process_never_loads_torch() -> None:
    """An expert server holds weights and kernels, not a deep-learning framework."""
    program = "import sys, expert_service.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
