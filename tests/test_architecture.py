"""Which packages may import which, and how large files may be."""

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "minigrpo"
FILES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path
    for path in PACKAGE.rglob("*.py")
}
ALGORITHM = {name for name in FILES if "." not in name and not name.startswith("__")}
# of runtime: they put the algorithm together
WIRING = {"build", "estimate", "run_dir", "announce", "no_effect", "startup"}
WIRING |= {"planner", "planned_job", "rates", "step_counts", "step_memory", "flops", "student"}
# What the modules of a room may import besides their own room. A name with a dot is a module.
MAY_SEE: dict[str, set[str]] = {
    "types": set(),
    "losses": {"runtime.loss_arguments"},
    "model": {"types", "runtime.flags", "runtime.text", "runtime.chat_messages"},
    "sampling": {"types", "config", "model", "runtime"},
    "sandbox": set(),
    "tasks": {"types", "rewards", "sandbox", "runtime.flags", "runtime.rng", "runtime.renamed"}
    | {"runtime.text", "runtime.reward_functions", "runtime.process_state"}
    | {"runtime.chat_messages", "runtime.task_sources", "runtime.calibration", "runtime.measures"},
    "rewards": {"types", "tasks.fen", "runtime.pool", "runtime.reward_calls"}
    | {"runtime.pending_rewards", "runtime.task_sources", "runtime.token_rewards"}
    | {"runtime.reward_functions", "runtime.reward_weights", "runtime.measures"},
    "config": {"losses", "model.architectures", "runtime", "tasks.registry"},
    "runtime": {"types", "config", "model", "tasks.registry"},
    "runtime wiring": {"types", "config", "losses", "model", "tasks", "runtime", "sampling"}
    | {"learner", "reference", "rewards"},
    "learner": {"types", "config", "losses", "model", "runtime"},
    "reference": {"types", "model", "runtime"},
    "evaluate": {"types", "rewards", "model", "sampling", "runtime"},
    "rollout": {
        "types",
        "config",
        "losses",
        "reference",
        "rewards",
        "model",
        "sampling",
        "runtime",
    },
    "trainer": ALGORITHM | {"model", "sampling", "runtime"},
    "tools": ALGORITHM | {"model", "sampling", "runtime", "tasks"},
}


def imports(name: str) -> tuple[set[str], set[str]]:
    """Modules of this package, and top-level modules of others, that a module imports.

    Imports for type checkers alone do not count.
    """
    own, others = set(), set()
    tree = ast.parse(FILES[name].read_text())
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            others.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            parents = name.removesuffix("__init__").rstrip(".").split(".")
            up = node.level - (name.endswith("__init__"))
            base = parents[: len(parents) - up] if name != "__init__" else []
            target = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                whole = f"{target}.{alias.name}".strip(".")
                own.add(whole if whole in FILES else target)
    return {module for module in own if module in FILES}, others


GRAPH = {name: imports(name)[0] for name in FILES}


def room_of(name: str) -> str:
    room, _, module = name.partition(".")
    return "runtime wiring" if room == "runtime" and module in WIRING else room


def reachable(name: str) -> set[str]:
    seen: set[str] = set()
    stack = [name]
    while stack:
        for other in GRAPH[stack.pop()] - seen:
            seen.add(other)
            stack.append(other)
    return seen


def test_the_graph_was_read() -> None:
    assert {"losses", "rewards", "model.packing", "tasks.registry"} <= reachable("trainer")
    assert "types" in GRAPH["tasks.chess_env"]
    assert {room_of(name) for name in FILES if not name.endswith("__")} == set(MAY_SEE)


def test_there_is_no_circle() -> None:
    assert not [name for name in FILES if name in reachable(name)]


def test_a_room_imports_only_what_is_below_it() -> None:
    wrong = []
    for name, targets in GRAPH.items():
        if name.endswith("__init__") or name == "__main__":
            continue
        room = room_of(name)
        for target in targets:
            seen = {target, target.partition(".")[0]}
            same = target.partition(".")[0] == name.partition(".")[0] and "." in name
            up = room == "runtime" and room_of(target) == "runtime wiring"
            if not (seen & MAY_SEE[room] or same) or up:
                wrong.append(f"{name} imports {target}")
    assert not wrong


def test_losses_see_no_model_and_the_model_sees_no_flag() -> None:
    assert reachable("losses") == {"runtime.loss_arguments"}
    for name in FILES:
        if name.startswith("model."):
            assert not reachable(name) & {"config", "rewards", "rollout", "trainer"}, name


def test_only_some_modules_may_import_chess_distributed_or_print() -> None:
    for name, path in FILES.items():
        others, text = imports(name)[1], path.read_text()
        if not name.startswith(("tasks.", "tools.")):
            assert "chess" not in others, name
        if name != "runtime.distributed":
            assert "torch.distributed" not in text.replace("torch.distributed.run", ""), name
        if not name.startswith("tools.") and name != "runtime.logging":
            names = [n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)]
            assert "print" not in names, name


def test_nothing_assigns_to_another_module() -> None:
    for name, path in FILES.items():
        tree = ast.parse(path.read_text())
        modules = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.level
            for alias in node.names
            if any(file.endswith(f".{alias.name}") or file == alias.name for file in FILES)
        }
        for node in ast.walk(tree):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    assert target.value.id not in modules, f"{name}: {ast.unparse(node)}"


EXTRAS = "plots", "report", "peer", "hub", "math"


def test_every_imported_package_is_declared() -> None:
    """What the installed commands import is a dependency; extras are imported where used."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [project["optional-dependencies"][name] for name in EXTRAS]
    declared = {
        re.split(r"[<>=\[ ]", x)[0].lower().replace("-", "_")
        for x in itertools.chain(project["dependencies"], *extras)
    }
    found = set[str]()
    for path in (*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *ROOT.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").split(".")[0])
    foreign = (
        found - sys.stdlib_module_names - {"minigrpo", "minigrpo_benchmarks", "benchmarks", "grpo"}
    )
    assert {"torch", "numpy", "rapidfuzz"} <= foreign
    assert {name.lower() for name in foreign} <= declared
    assert {re.split(r"[<>=\[ ]", x)[0].lower() for x in project["dependencies"]} <= {
        name.lower() for name in foreign
    } | {"tensorboard"}  # imported by torch.utils.tensorboard


def project_code() -> list[Path]:
    """The project's own code without its tests."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split() if not name.startswith("tests/")]


def test_a_file_is_read_in_one_sitting() -> None:
    sizes = {path.name: len(path.read_text().splitlines()) for path in project_code()}
    assert len(sizes) > 50
    assert not {name: lines for name, lines in sizes.items() if lines > 300}


def test_the_algorithm_is_read_in_an_afternoon() -> None:
    assert sum(len(path.read_text().splitlines()) for path in PACKAGE.glob("*.py")) <= 2000


def test_lines_are_at_most_100_wide() -> None:
    for path in project_code():
        wide = [n for n, line in enumerate(path.read_text().splitlines(), 1) if len(line) > 100]
        assert not wide, f"{path.name}: lines {wide}"
