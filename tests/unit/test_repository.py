"""The repository itself: pins agree, notebooks are clean and take the parameters they are given,
arrows go one way.
"""

import ast
import json
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from workbench.experiment.profile_sections import ROOT
from workbench.replay import NOTEBOOKS


@pytest.mark.parametrize("how", ["check", "format --check"])
def test_the_code_is_as_make_lint_wants_it(how):
    code = ["workbench", "tests", "fixtures/training"]
    command = [sys.executable, "-m", "ruff", *how.split(), *code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_ci_calls_the_one_test_command():
    assert re.search(r"^exec make test$", (ROOT / ".ci" / "run").read_text(), re.M)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_is_clean_and_only_composes(path):
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    parameters = [cell for cell in code if "parameters" in cell["metadata"].get("tags", [])]
    assert len(parameters) == 1
    tree = ast.parse("".join(parameters[0]["source"]))
    assert all(
        isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) for node in tree.body
    )  # plain literals
    assert {node.targets[0].id for node in tree.body} == {"profile", "out"}
    for cell in code:
        body = ast.parse("".join(cell["source"]))
        assert not [
            n
            for n in ast.walk(body)
            if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.If, ast.While, ast.Try))
        ], path.stem


def test_the_replayed_notebooks_exist():
    assert {n.name for n in NOTEBOOKS} <= {p.stem for p in (ROOT / "notebooks").glob("*.ipynb")}


def test_sglangs_processes_load_no_notebook_or_table_package():
    code = (
        "import sys, workbench.engine.plugin as p, workbench.engine.cpu.backend; print([m for m in"
        " ('pandas', 'altair', 'IPython', 'papermill', 'scipy', 'pydantic', 'workbench.run.lab') if"
        " m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_no_grammar_of_iris_is_built_whatever_is_imported_first():
    """An order of imports that a formatter changes costs every notebook and command seconds."""
    for module in ("workbench.publish", "workbench.replay", "workbench.panel"):
        code = f"import sys, {module}; print('jsonschema' in sys.modules, 'lark' in sys.modules)"
        said = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        assert said.split() == ["True", "False"], module


# What the outside may know of the engine: its orders, its tables and where its stand-ins lie, none
# of which touches SGLang.
SHARED = (
    "workbench.engine.orders",
    "workbench.engine.cpu.paths",
    "workbench.engine.stages",
    "workbench.engine.unsupported",
)
ROOMS = (
    {"engine"},
    {"experiment"},
    {"judge", "serving"},
    {"predict"},
    {"run"},
    {"report"},
    {"answers"},
    {"doors"},
)
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "workbench").rglob("*.py")
    if "stand_ins" not in path.parts
}


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOOR else "doors"


def imported(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it, type hints included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {part if part in MODULES else node.module for part in parts}
    return found


@pytest.mark.parametrize("module", sorted(MODULES))
def test_arrows_go_one_way(module):
    here = room(module)
    for name in imported(MODULES[module]):
        if name.startswith("workbench."):
            there = room(name)
            allowed = here == there or FLOOR[there] < FLOOR[here]
            assert allowed, f"{module} imports {name}, which stands above or beside it"
            if there == "engine" != here:
                assert name in SHARED, f"{module} imports {name}"
        elif name.split(".")[0] == "sglang" and here != "engine":
            assert module == "workbench.answers.probe_sglang", f"{module} imports {name}"


def test_no_module_is_in_a_circle():
    inside = {name: imported(path) & set(MODULES) - {name} for name, path in MODULES.items()}
    list(TopologicalSorter(inside).static_order())  # raises CycleError, naming the circle


def test_the_house_stays_small():
    top = [path for path in (ROOT / "workbench").iterdir() if path.name != "__pycache__"]
    assert len(top) <= 16, sorted(path.name for path in top)
    long = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: lines for name, lines in long.items() if lines > 350} == {}
    assert {path.name for path in (ROOT / "tests" / "unit").iterdir() if path.is_dir()} - {
        "__pycache__"
    } == set(FLOOR) - {"doors"}


def test_modules_say_what_they_are_for():
    for path in (ROOT / "workbench").rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path.name
