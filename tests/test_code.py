"""The code tasks: MBPP's lines, what a completion's code is, the parts, one-line functions."""

import sys
from pathlib import Path
from typing import Any

import pytest

from examples.mbpp import code_of
from examples.one_liners import HIDDEN, SHOWN, OneLiners
from minigrpo.rewards.scorer import RewardScorer
from minigrpo.tasks.base import WrappedTask
from minigrpo.tasks.loading import load_task
from minigrpo.types import Example

from .steps import group
from .tiny import ROOT, refused, write_jsonl

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code runs on Linux only")


def problem(number: int, **others: Any) -> dict[str, Any]:
    """A line in the full form, as it is published."""
    return {
        "text": f"Write a function to add {number}.",
        "code": f"def add(x):\r\n  return x + {number}",
        "task_id": number,
        "test_setup_code": "",
        "test_list": [f"assert add(1) == {number + 1}", f"assert add(-1) == {number - 1}"],
        **others,
    }


def read(tmp_path: Path, rows: list[dict[str, Any]], **args: Any) -> WrappedTask:
    path = write_jsonl(tmp_path / "mbpp.jsonl", rows)
    task_file = str(ROOT / "examples" / "mbpp.py")
    task = load_task(task_file, seed=0, data=str(path), args=args)
    assert isinstance(task, WrappedTask)
    alone = load_task(task_file, seed=0, eval_data=str(path), args=args)  # as `evaluate` loads it
    assert {row["task_id"] for row in rows} >= {alone.held_out(0).fields["task_id"]}
    return task


def test_published_lines_become_prompts_with_their_tests(tmp_path: Path) -> None:
    full = problem(700)
    sanitized = {**full, "prompt": full["text"], "test_imports": ["import math"]}
    for left_out in ("text", "test_setup_code"):
        del sanitized[left_out]
    for line in (full, sanitized):
        task = read(tmp_path, [problem(12), line], timeout="2.5")
        example = task.train(0)
        assert example.prompt == (
            "You are an expert Python programmer, and here is your task: Write a function to add "
            "700. Your code should pass these tests:\n\nassert add(1) == 701\n"
            "assert add(-1) == 699\n"
        )
        assert example.answer == "def add(x):\n  return x + 700"
        assert example.fields == line and task.source.timeout_s == 2.5


def test_the_published_split_holds(tmp_path: Path) -> None:
    again = problem(700, text=problem(11)["text"])  # a held-out question by another number
    task = read(tmp_path, [*map(problem, (1, 11, 510, 511, 601, 974)), again])
    held_out = {task.held_out(i).fields["task_id"] for i in range(task.num_held_out)}
    assert held_out == {11, 510}
    assert {task.train(i).fields["task_id"] for i in range(8)} == {1, 511, 601, 974}
    # a file with one side of it is split by its questions
    assert 1 < read(tmp_path, [*map(problem, range(601, 700))]).num_held_out < 30


NO_PROBLEMS = [
    *({"text": ""}, {"text": None}, {"code": [7]}, {"test_setup_code": "import"}),
    *({"test_list": tests} for tests in ([], None, "assert f(1)", ["assert f("])),
]


@pytest.mark.parametrize("changed", NO_PROBLEMS, ids=str)
def test_a_line_that_is_no_problem_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    refused(read, tmp_path, [problem(700), problem(11, **changed)])


def test_code_is_the_first_block_or_the_whole_text() -> None:
    for text, code in {
        "x = 1": "x = 1",
        "So:\n```python\nx = 1\n```\nThen ```python\ny\n```": "x = 1\n",
        "``` Python \r\nx\r\n```": "x\r\n",
        "```json\n{}\n```\n```python title=a.py\nx\n```": "x\n",
        "<think>```python\ndraft\n```</think>\n```python\nx\n```": "x\n",
        "```py\nx = 1\ny": "x = 1\ny",  # cut off
        "1. So:\n   ```py\n   if x:\n       y\n   ```": "if x:\n    y\n",
        "Run ```bash\nls\n```: ```python\nx\n```": "x\n",
        "": "",
    }.items():
        assert code_of(text) == code


def test_the_parts_are_all_tests_passed_and_the_share_of_them(tmp_path: Path) -> None:
    task = read(tmp_path, [problem(11), problem(700)])
    examples = [task.train(0), task.held_out(0)]
    texts = [
        group("```python\ndef add(x): return x + 700\n```", "def add(x): return 701", "import"),
        group(examples[1].answer, "def add(x): raise SystemExit", ""),
    ]
    table = RewardScorer(task, workers=2).score(examples, texts)
    assert table.scores["passed"].values.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert table.scores["tests"].values.tolist() == [[1, 0.5, 0], [1, 0, 0]]
    assert table.total.tolist() == [[1.5, 0.25, 0], [1.5, 0, 0]]


def test_a_setup_and_imports_run_before_the_tests(tmp_path: Path) -> None:
    fields = {
        "test_list": ["assert math.isclose(half(root), 0.5)", "assert floor(half(root)) == 0"],
        "test_setup_code": "root = Node(1)",
        "test_imports": ["import math", "from math import floor"],
    }
    code = "class Node:\n  def __init__(self, x): self.x = x\ndef half(node): return node.x / 2"
    task = read(tmp_path, [problem(11), problem(700)])
    assert task.score(Example("?", code, fields=fields), code)["passed"] == 1


def test_a_function_that_fits_the_examples_passes_and_a_table_of_them_does_not() -> None:
    task = OneLiners(0)
    example = task.train(0)
    shown = dict(text[2:].split(")=") for text in example.prompt.split("\n")[0].split())
    right = example.fields["code"]
    table = f" return int({shown}[str(x)])"
    share = len(SHOWN) / len(SHOWN + HIDDEN)
    for code, passed, tests in ((right, 1, 1), (table, 0, share), (" return", 0, 0)):
        assert task.score(example, code) == {"passed": passed, "tests": pytest.approx(tests)}
