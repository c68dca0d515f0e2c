"""The shape of the house: its budget, no circles, and who may import what."""

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from minigrpo.config import places

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "minigrpo"
FILES = sorted(PACKAGE.rglob("*.py"))
BUDGET = {"lines": 13_200, "files": 106, "settings": 78, "lines of a whole step": 3_100}
# the files that show a whole step
STEP = (
    *("trainer", "rollout", "learner", "losses", "advantages", "types"),
    *("model/transformer", "model/packing", "model/logprobs"),
)
# The rooms, from the bottom. A room is a file at the top level or a folder. It may import rooms of
# the rows above its own here, and no others.
FLOORS = (
    "assets clock errors fen",
    "sandbox",
    "types userfiles",
    "identity",
    "model task",
    "defaults",
    "config",
    "runtime",
    "advantages metrics",
    "losses rewards run",
    "tasks",
    "turns",
    "learner sampling",
    "evaluate",
    "parts",
    "resolve rollout",
    "trainer",
    "tools",
    "api",
    "__init__ __main__",
)


def lines(*files: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def module_of(file: Path) -> str:
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_of(file) for file in FILES}


def imports(file: Path) -> Iterator[str]:
    """The modules that a file imports, wherever it does so; those of the package in full."""
    here = module_of(file).split(".")
    package = here if file.name == "__init__.py" else here[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield inner if inner in MODULES else module


def graph(depth: int) -> dict[str, set[str]]:
    """Who imports whom in the package; with depth 2, the files of a folder are one."""

    def room(name: str) -> str:
        return ".".join(name.split(".")[1:depth]) or "__init__"

    found = defaultdict[str, set[str]](set)
    for file in FILES:
        here = room(module_of(file))
        inside = {name for name in imports(file) if name.split(".")[0] == PACKAGE.name}
        found[here] |= {room(name) for name in inside} - {here}
    return dict(found)


def test_the_package_stays_within_its_budget() -> None:
    step = [PACKAGE / f"{name}.py" for name in STEP if (PACKAGE / f"{name}.py").exists()]
    step += (PACKAGE / "sampling").glob("*.py")
    found = {"lines": lines(*FILES), "files": len(FILES), "settings": len(places())}
    found["lines of a whole step"] = lines(*step)
    # name -> what is there and the limit: something must go first
    assert {name: (n, BUDGET[name]) for name, n in found.items() if n > BUDGET[name]} == {}


@pytest.mark.parametrize("depth", [3, 2])
def test_no_file_and_no_folder_imports_itself_through_others(depth: int) -> None:
    imported, whole = graph(depth), set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"circle: {' -> '.join([*path, name])}"
        if name not in whole:
            for other in imported[name]:
                visit(other, (*path, name))
            whole.add(name)

    for name in imported:
        visit(name, ())


def test_no_import_runs_back_up() -> None:
    floor = {name: number for number, names in enumerate(FLOORS) for name in names.split()}
    imported = graph(depth=2)
    assert floor.keys() == imported.keys()
    pairs = [(here, other) for here, others in imported.items() for other in others]
    assert [(here, other) for here, other in pairs if floor[other] >= floor[here]] == []


def test_losses_know_no_model_and_chess_stays_in_its_rooms() -> None:
    of_losses = {name for name in imports(PACKAGE / "losses.py") if name.startswith("minigrpo")}
    assert of_losses == {"minigrpo.advantages"}
    chess = {
        file.relative_to(PACKAGE).as_posix()
        for file in FILES
        if any(name.split(".")[0] == "chess" for name in imports(file))
    }
    assert all(name == "fen.py" or name.startswith(("tasks/", "tools/")) for name in chess)


def test_the_wheel_has_every_folder_with_code() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {*project["tool"]["setuptools"]["packages"]}
    folders = {file.parent.relative_to(ROOT) for file in FILES}
    assert {".".join(folder.parts) for folder in folders} <= packages
