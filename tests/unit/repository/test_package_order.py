"""Guards the order of each service's packages: every import points downward, so that no circle can begin.

Imports for type checkers (TYPE_CHECKING) and those inside functions count like all others.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.unit.repository.test_structure import imported_modules, parsed, sources

# Per service its packages, lowest first: a package imports itself and those before it. A module that is in
# none of them has a place of its own.
ORDERS: Mapping[str, tuple[str, ...]] = {
    "gateway": (
        "schemas",
        "processes",
        "telemetry",
        "transport",
        "text",
        "parsers",
        "constraints",
        "replicas",
        "generation",
        "apis",
        "prompts",
        "batches",
        "web",
        "app",
        "workers",
        "main",
    ),
    "gpu_service": (
        "core",
        "telemetry",
        "device",
        "ops",
        "cache",
        "attention",
        "experts",
        "layers",
        "models",
        "loader",
        "vision",
        "speculation",
        "scheduler",
        "memory",
        "engine",
        "parallel",
        "verify",
        "assembly",
        "server",
        "main",
    ),
}
Imports = Mapping[str, set[str]]  # of each module, by full names


def imports_of(service: str) -> Imports:
    """Returns what each module of a service imports of the service's other modules and packages."""
    trees = {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__"): parsed(path)
        for path in sources()
        if path.suffix == ".py" and path.parts[0] == service
    }
    return {module: imported_modules(tree) & trees.keys() - {module} for module, tree in trees.items()}


def package_of(module: str) -> str:
    """Returns a module's package below its service; of the service itself an empty string."""
    return module.partition(".")[2].partition(".")[0]


def upward(order: tuple[str, ...], imports: Imports) -> list[str]:
    """Returns the imports that point upward, and modules that have no place in the order."""
    place = {name: number for number, name in enumerate(("", *order))}
    wrong = [f"{module} has no place" for module in imports if package_of(module) not in place]
    return wrong + [
        f"{module} -> {other}"
        for module, others in imports.items()
        for other in sorted(others)
        if place.get(package_of(module), 0) < place.get(package_of(other), 0)
    ]


def test_every_kind_of_import_counts() -> None:
    """Upward imports are found wherever they stand: under TYPE_CHECKING, inside functions, by either form."""
    text = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from service.high import one\n"
        "def f():\n    import service.high.two\n"
        "from service import top\n"
    )
    imports = {"service.low.a": imported_modules(ast.parse(text)), "service.loose": set[str]()}
    assert upward(("low", "high", "top"), imports) == [
        "service.loose has no place",
        "service.low.a -> service.high",
        "service.low.a -> service.high.one",
        "service.low.a -> service.high.two",
        "service.low.a -> service.top",
    ]
    assert upward(("top", "high", "low", "loose"), imports) == []


@pytest.mark.parametrize("service", ORDERS)
def test_imports_point_downward(service: str) -> None:
    """Each module has a place in its service's order and imports nothing from above it."""
    order, imports = ORDERS[service], imports_of(service)
    assert set(order) <= {package_of(module) for module in imports}
    assert upward(order, imports) == []


@pytest.mark.parametrize("service", ORDERS)
def test_no_modules_of_a_package_import_one_another(service: str) -> None:
    """Within packages, too, modules have an order: none imports itself through others."""
    try:
        TopologicalSorter(imports_of(service)).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
