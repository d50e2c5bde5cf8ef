"""Imports point down: cli -> the public names in __init__ -> run -> moe -> gguf -> native -> errors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ggufmoe

ROOT = Path(ggufmoe.__file__).parent
LAYERS = ("errors", "native", "gguf", "moe", "run", "models", "__init__", "cli", "__main__")
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def imported(module: Path) -> set[str]:
    """Full names of all modules that a module imports, wherever in it."""
    package = ["ggufmoe", *module.parts[:-1]]
    names = set()
    for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            start = ".".join(filter(None, (base, node.module)))
            names |= {start, *(f"{start}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_point_down(module: Path) -> None:
    own = LAYERS.index(module.parts[0].removesuffix(".py"))
    for name in imported(module):
        layer = name.split(".")[1] if name.startswith("ggufmoe.") else name.replace("ggufmoe", "__init__")
        if layer in LAYERS:
            assert LAYERS.index(layer) <= own, f"{module} imports {name}"
            assert layer != "models" or module.parts[0] in ("cli", "models"), f"{module} imports {name}"
        assert name.split(".")[0] not in ("ctypes", "llama_cpp") or module.parts[0] == "native", (
            f"{module}: {name}"
        )


def test_every_folder_is_a_layer() -> None:
    assert {module.parts[0].removesuffix(".py") for module in MODULES} == {*LAYERS}
