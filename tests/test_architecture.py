"""Imports go down, or sideways without a circle; losses never see a model; few modules may import
chess or print.
"""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "minigrpo"
FILES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path
    for path in PACKAGE.rglob("*.py")
}


def imports(name: str) -> tuple[set[str], set[str]]:
    """Modules of this package, and top-level modules of others, that a module imports anywhere in
    it.
    """
    own, others = set(), set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            others.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            parents = name.removesuffix(".__init__").split(".")
            base = parents[
                : len(parents) - node.level + (name.endswith("__init__") and "." in name)
            ]
            target = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            names = [f"{target}.{alias.name}".strip(".") for alias in node.names]
            found = [n for n in [target, f"{target}.__init__", *names] if n in FILES]
            own.add(
                found[0] if target in FILES else next((n for n in names if n in FILES), found[0])
            )
    return own, others


GRAPH = {name: imports(name)[0] for name in FILES}


def reachable(name: str) -> set[str]:
    seen: set[str] = set()
    stack = [name]
    while stack:
        for other in GRAPH[stack.pop()] - seen:
            seen.add(other)
            stack.append(other)
    return seen


def test_the_graph_was_read() -> None:
    assert {"losses", "rewards", "packing", "tasks.__init__"} <= reachable("trainer")
    assert "types" in GRAPH["tasks.chess_env"]


def test_there_is_no_circle() -> None:
    assert not [name for name in FILES if name in reachable(name)]


def test_losses_see_no_model_and_models_no_config() -> None:
    assert reachable("losses") == set()
    for name in ("model", "packing", "sampling", "logprobs", "reference"):
        assert "config" not in reachable(name)
        assert not reachable(name) & {"trainer", "rewards", "rollout"}


def test_only_some_modules_may_import_chess_distributed_or_print() -> None:
    for name, path in FILES.items():
        others, text = imports(name)[1], path.read_text()
        if not name.startswith(("tasks.", "tools.")) and name != "fen":
            assert "chess" not in others, name
        if name not in ("distributed", "accel"):
            assert "torch.distributed" not in text.replace("torch.distributed.run", ""), (
                name
            )  # but the launcher
        if not name.startswith("tools.") and name != "metrics":
            assert not [
                n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name) and n.id == "print"
            ], name


def test_a_file_is_read_in_one_sitting() -> None:
    assert not {
        name: lines
        for name, path in FILES.items()
        if (lines := len(path.read_text().splitlines())) > 350
    }
