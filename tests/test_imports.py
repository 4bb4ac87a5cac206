"""Imports between packages point one way, and a module's name says which one it is; see docs/architecture.md."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vitrail"
# Each package imports only those before it, and the modules at the top (errors, formatting, ...).
ORDER = [
    "pages",
    "layers",
    "heads",
    "data",
    "web",
    "models",
    "recipes",
    "checkpoints",
    "training",
    "teachers",
    "evaluation",
    "interpret",
    "deploy",
    "tasks",
    "runs",
    "explore",
    "bench",
    "cli",
]
EXCEPTIONS = {("models/vision_transformer.py", "evaluation")}  # model.predict
# Names of several modules; those in cli/ are the names of commands.
SHARED = {"__init__", "__main__", "config", "fold", "lookup", "registry"}
TWINS = [
    {"models", "recipes"},  # the page of a paper
    {"recipes", "tasks"},  # an objective and the recipes that use it
    {"models", "recipes", "checkpoints/formats"},  # a paper whose repository has a format of its own
    {"recipes", "tasks", "checkpoints/formats"},  # BEiT
    {"data", "data/transforms/kernels"},  # the same on the GPU
    {"data/transforms", "data/transforms/kernels"},
    {"layers", "interpret"},  # attention, and its weights of a recorded forward pass
    {"checkpoints", "data/datasets"},  # the hub: weights and data sets
]


def imported(path: Path) -> set[str]:
    """What follows "vitrail." in the imports of a file, also of those inside functions and for types."""
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("vitrail.")}


def test_every_package_has_its_place():
    assert sorted(ORDER) == sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


@pytest.mark.parametrize("package", ORDER)
def test_imports_point_one_way(package):
    later = set(ORDER[ORDER.index(package) + 1 :])
    found = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in (PACKAGE / package).rglob("*.py")
        for name in imported(path) & later
    }
    assert not found - EXCEPTIONS


def test_names_of_modules_are_unique():
    folders: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        folder = path.relative_to(PACKAGE).parent.as_posix()
        if folder != "cli" and path.stem not in SHARED:
            folders.setdefault(path.stem, []).append(folder)
    assert not {name: found for name, found in folders.items() if len(found) > 1 and set(found) not in TWINS}
