"""The house: floors import downwards only, and the lower ones never import torch (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUND = {"sched", "trace", "spec", "results", "kernels", "errors"}
MAY_IMPORT = {
    "cli": GROUND | {"bench", "plan", "memory", "sim", "engine"},
    "bench": GROUND | {"engine", "plan", "memory", "sim"},
    "plan": GROUND | {"memory", "sim"},
    "memory": GROUND,
    "sim": GROUND,
    "sched": {"trace", "errors"},
    "trace": {"errors"},
    "spec": {"errors"},
    "results": {"errors"},
    "kernels": {"errors"},
}
FILES = [
    (floor, path)
    for floor in MAY_IMPORT
    for path in sorted((ROOT / "kernels" if floor == "kernels" else ROOT / "kvplan" / floor).glob("*.py"))
]


def imports(path: Path) -> set[str]:
    """Every module a file names in an import, lazy ones too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(("floor", "path"), FILES, ids=lambda value: getattr(value, "name", value))
def test_floors_import_downwards_only(floor: str, path: Path) -> None:
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("kvplan.")} - {
        floor,
        "__version__",
    }
    assert ours <= MAY_IMPORT[floor]


@pytest.mark.parametrize(
    "path",
    [path for floor, path in FILES if floor in ("sched", "memory", "spec", "trace")],
    ids=lambda p: p.name,
)
def test_lower_floors_never_import_torch(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[0] in ("torch", "triton", "pandas")}
