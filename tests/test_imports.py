"""Imports point one way, and using a network needs no Lightning."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Each row may import from the rows above it. Modules of one row do not import one another, except within a package,
# and except where listed in the order of the row itself: `a, b` lets b import a.
ROWS = [
    ["errors", "process", "rows", "atomic"],
    ["network", "color", "resize", "image", "pictures", "fetch", "weightfiles"],
    ["registry", "weights", "onnx_network"],
    ["archs", "degradations", "metrics", "optim", "schedules"],
    ["rebuild", "checkpoint", "data"],
    [
        "inference",
        "batch",
        "finetune",
        "losses",
        "evaluation",
        "preview",
        "attention_map",
        "profiling",
        "efficiency",
        "plots",
        "export",
        "card",
        "basicsr",
        "leaderboard",
        "distill",
    ],
    ["pace", "module", "gan", "safeguards", "callbacks", "logs"],
    ["config_errors"],
    ["cli"],
]
IN_ORDER = {
    ("atomic", "errors"),
    ("pictures", "image"),
    ("checkpoint", "rebuild"),
    ("weights", "registry"),
    ("efficiency", "profiling"),
    ("card", "efficiency"),
    ("batch", "inference"),
    ("evaluation", "inference"),
    ("distill", "inference"),
    ("leaderboard", "inference"),
    ("leaderboard", "evaluation"),
    ("leaderboard", "efficiency"),
    ("module", "pace"),
    ("gan", "module"),
    ("safeguards", "module"),
    ("callbacks", "module"),
}
LIGHTNING = {
    "pace",
    "module",
    "gan",
    "safeguards",
    "callbacks",
    "logs",
    "cli",
    "data",
}  # of data only sr/data/module.py


def row_of(part: str) -> int:
    return next(i for i, row in enumerate(ROWS) if part in row)


def imports(path: Path) -> list[str]:
    """Modules that a file imports, at the top or inside a function."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append(node.module or "")
    return found


FILES = sorted(p for p in (ROOT / "sr").rglob("*.py") if p != ROOT / "sr" / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    own = path.relative_to(ROOT / "sr").parts[0].removesuffix(".py")
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "sr" and len(parts) > 1 and parts[1] != own and (own, parts[1]) not in IN_ORDER:
            assert row_of(parts[1]) < row_of(own), f"{own} imports {parts[1]}"
        if parts[0] in ("lightning", "pytorch_lightning"):
            assert own in LIGHTNING and (own != "data" or path.name == "module.py"), f"{path} imports lightning"


def test_using_a_network_imports_no_lightning():
    code = "import sys, sr, sr.data, sr.evaluation; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "sr.inference" in out.stdout.split()
    assert not {"lightning", "pytorch_lightning"} & set(out.stdout.split())
