"""The shape of the house: its budget, no circles, and who may import what."""

import ast
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from io import StringIO
from itertools import chain
from pathlib import Path
from token import COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL, STRING
from tokenize import TokenInfo, generate_tokens
from typing import Any

import pytest

from minigrpo.config import places

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "minigrpo"
FILES = sorted(PACKAGE.rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
# The files that show a whole step.
STEP = (
    *("trainer", "rollout", "learner", "losses", "advantages", "types"),
    *("model/transformer", "model/packing", "model/logprobs", "sampling/*"),
)
LAYOUT = {COMMENT, DEDENT, ENDMARKER, INDENT, NL}
# The rooms, from the bottom. A room is a file at the top level or a folder. It may import rooms of
# the rows above its own here, and no others.
FLOORS = (
    "assets errors fen rng settings statistics",
    "hub sandbox shards types userfiles",
    "advantages checkpoint guard identity metrics task",
    "losses text",
    "model",
    "runtime",
    "config",
    "memory optimizer rewards",
    "run tasks",
    "turns",
    "given learner sampling",
    "evaluate",
    "build rollout",
    "trainer",
    "tools",
    "api",
    "__init__ __main__",
)


def lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def tokens_per_code_line(files: Iterable[Path]) -> float:
    """The mean to one digit, without comments, and without statements that are only a text."""
    num_tokens = num_lines = 0
    for file in files:
        statements: list[list[TokenInfo]] = [[]]
        for token in generate_tokens(StringIO(file.read_text()).readline):
            if token.type == NEWLINE:
                statements.append([])
            elif token.type not in LAYOUT:
                statements[-1].append(token)
        code = [tokens for tokens in statements if [x.type for x in tokens] != [STRING]]
        rows = [range(x.start[0], x.end[0] + 1) for tokens in code for x in tokens]
        num_tokens += len(rows)
        num_lines += len({*chain(*rows)})
    return round(num_tokens / num_lines, 1)


def function_lengths(files: Iterable[Path]) -> list[int]:
    """The lines of each function, the shortest first."""
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text())))
    functions = (x for x in nodes if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef))
    return sorted(node.end_lineno - node.lineno + 1 for node in functions)


def module_of(file: Path) -> str:
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_of(file) for file in [*FILES, *BENCHMARKS]}


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


def graph(files: Iterable[Path], depth: int) -> dict[str, set[str]]:
    """Who imports whom among files; with depth 2, the files of a folder are one."""

    def room(name: str) -> str:
        return ".".join(name.split(".")[1:depth]) or "__init__"

    found = defaultdict[str, set[str]](set)
    for file in files:
        package = module_of(file).split(".")[0]
        here = room(module_of(file))
        inside = {name for name in imports(file) if name.split(".")[0] == package}
        found[here] |= {room(name) for name in inside} - {here}
    return dict(found)


def test_the_code_stays_within_its_budget() -> None:
    """Where something is over its limit, something else must go first."""
    step = [file for name in STEP for file in PACKAGE.glob(f"{name}.py")]
    lengths = function_lengths(FILES)
    table = [
        # what, measured, limit
        ("library: lines", lines(FILES), 13_200),
        ("library: files", len(FILES), 106),
        ("library: tokens per code line", tokens_per_code_line(FILES), 9.4),
        ("library: lines of the longest function", lengths[-1], 70),
        ("library: lines that 19 of 20 functions stay below", lengths[len(lengths) * 19 // 20], 32),
        ("library: settings", len(places()), 78),
        ("library: lines of a whole step", lines(step), 3_100),
        ("tests: lines", lines(TESTS), 13_800),
        ("tests: tokens per code line", tokens_per_code_line(TESTS), 11.0),
        ("benchmarks: lines", lines(BENCHMARKS), 2_200),
        ("benchmarks: files", len(BENCHMARKS), 14),
    ]
    assert [row for row in table if row[1] > row[2]] == []


@pytest.mark.parametrize(("files", "depth"), [(FILES, 3), (FILES, 2), (BENCHMARKS, 2)])
def test_no_file_and_no_folder_imports_itself_through_others(files: Any, depth: int) -> None:
    imported, whole = graph(files, depth), set()

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
    imported = graph(FILES, depth=2)
    assert floor.keys() == imported.keys()
    pairs = [(here, other) for here, others in imported.items() for other in others]
    assert [(here, other) for here, other in pairs if floor[other] >= floor[here]] == []


def test_losses_know_no_model_and_chess_stays_in_its_rooms() -> None:
    of_losses = {name for name in imports(PACKAGE / "losses.py") if name.startswith("minigrpo")}
    assert of_losses == set()
    for file in FILES:
        knows_chess = any(name.split(".")[0] == "chess" for name in imports(file))
        assert not knows_chess or file.relative_to(PACKAGE).parts[0] in ("fen.py", "tasks")


def test_the_wheel_has_every_folder_with_code() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {*project["tool"]["setuptools"]["packages"]}
    folders = {file.parent.relative_to(ROOT) for file in FILES}
    assert {".".join(folder.parts) for folder in folders} <= packages


def defined_names(node: ast.AST) -> Iterator[str]:
    """The names that a module gives to functions, classes, arguments, variables and fields."""
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.arg):
            yield child.arg
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            yield child.attr


def test_the_code_uses_the_names_of_the_glossary() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    glossary = page[page.index("### Glossary") :]
    rows = [line.split("|") for line in glossary.splitlines() if line.startswith("| ")][1:]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row[3])}
    unused = {*re.findall(r"`(\w+)`", glossary[glossary.index("are not used:") :].split("\n\n")[0])}
    used = {name for file in FILES for name in defined_names(ast.parse(file.read_text()))}
    assert len(listed) > 20
    assert listed <= used
    assert not unused & used


def test_no_two_functions_or_classes_share_a_name() -> None:
    names = Counter[str]()
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "main":
                names[node.name] += 1
    assert [name for name, number in names.items() if number > 1] == []
