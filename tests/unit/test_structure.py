"""Guards the shape of the tree: small files, small functions, imports that run in one direction."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVICES = {"gateway", "gpu_service", "expert_service"}
SHARED = {"protos", "moebius"}


def sources() -> list[Path]:
    """Every tracked or new Python and C++ file of the product (not tests, not generated stubs)."""
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


def code_lines(path: Path) -> int:
    """Lines that are not blank."""
    return sum(1 for line in (ROOT / path).read_text().splitlines() if line.strip())


def imported_packages(tree: ast.AST) -> set[str]:
    """Top-level names of absolute imports anywhere in the file."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def imported_modules(tree: ast.AST) -> set[str]:
    """Full names of absolutely imported modules, and of what is imported from them."""
    names: set[str] = set()
    for node in ast.walk(tree):
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
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
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
        imports = imported_packages(ast.parse((ROOT / path).read_text()))
        forbidden = (SERVICES - {top}) | ({"torch"} if top != "gpu_service" else set())
        crossing += [f"{path} -> {name}" for name in sorted(imports & forbidden)]
    assert crossing == []


def test_only_the_roof_imports_services() -> None:
    """What `moebius/` shares with the services imports none of them; `moebius/app` stands above them all."""
    upward = []
    for path in sources():
        if path.suffix != ".py" or path.parts[0] not in SERVICES | SHARED:
            continue
        if path.parts[:2] == ("moebius", "app") or path == Path("moebius/__main__.py"):
            continue
        tree = ast.parse((ROOT / path).read_text())
        if path.parts[0] == "moebius":
            upward += [f"{path} -> {name}" for name in sorted(imported_packages(tree) & SERVICES)]
        modules = sorted(imported_modules(tree))
        upward += [f"{path} -> {name}" for name in modules if name.startswith("moebius.app")]
    assert upward == []


def test_gateway_process_never_loads_torch() -> None:
    """Importing the whole gateway leaves torch out of the process, transitively too."""
    program = "import sys, gateway.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_expert_process_never_loads_torch() -> None:
    """An expert server holds weights and kernels, not a deep-learning framework."""
    program = "import sys, expert_service.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
