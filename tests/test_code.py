"""The code task: MBPP's lines, what a completion's code is, the parts, one-line functions."""

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigrpo import Config
from minigrpo.evaluate import answer
from minigrpo.rewards import RewardScorer
from minigrpo.runtime.build import make_tokenizer
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.job_summary import write_job_summary
from minigrpo.runtime.settings import read_settings
from minigrpo.runtime.trained import load_model
from minigrpo.sampling.sampler import Sampler
from minigrpo.sandbox.workers import SandboxError
from minigrpo.tasks.code import CodeTask, code_of
from minigrpo.tasks.code_data import CodeData
from minigrpo.tasks.confidence import with_confidence, write
from minigrpo.tasks.files import SilentListener
from minigrpo.tasks.one_liners import HIDDEN, KINDS, SHOWN, OneLiners
from minigrpo.tasks.registry import load_task
from minigrpo.trainer import Trainer
from minigrpo.types import Example

from .chat_model import write_lines, write_model

ROOT = Path(__file__).parent.parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="code runs on Linux only")


def problem(number: int, **others: Any) -> dict[str, Any]:
    """A line in the full form, as it is published."""
    return {
        "text": f"Write a function to add {number}.",
        "code": f"def add(x):\r\n  return x + {number}",
        "task_id": number,
        "test_setup_code": "",
        "test_list": [f"assert add(1) == {number + 1}", f"assert add(-1) == {number - 1}"],
        "challenge_test_list": [],
        **others,
    }


def sanitized(number: int) -> dict[str, Any]:
    """A line in the sanitized form."""
    row = problem(number)
    kept = {name: row[name] for name in ("task_id", "code", "test_list")}
    return {"source_file": "x", "prompt": row["text"], "test_imports": ["import math"], **kept}


def read(tmp_path: Path, rows: list[dict[str, Any]]) -> CodeData:
    path = write_lines(tmp_path / "mbpp.jsonl", rows)
    task = load_task("code", seed=0, data=str(path), timeout_s=2.0)
    assert isinstance(task, CodeData)
    return task


@pytest.mark.parametrize("form", [problem, sanitized])
def test_a_published_line_becomes_a_prompt_with_its_tests(
    tmp_path: Path, form: Callable[[int], dict[str, Any]]
) -> None:
    task = read(tmp_path, [form(12), form(700)])
    assert task.train(0).prompt == (
        "You are an expert Python programmer, and here is your task: Write a function to add 700. "
        "Your code should pass these tests:\n\nassert add(1) == 701\nassert add(-1) == 699\n"
    )
    assert task.train(0).answer == "def add(x):\n  return x + 700"
    assert task.train(0).fields == form(700)
    assert task.timeout_s == 2.0


def test_the_published_split_holds(tmp_path: Path) -> None:
    task = read(tmp_path, [problem(number) for number in (1, 11, 510, 511, 601, 974)])
    assert {task.held_out(i).fields["task_id"] for i in range(task.num_held_out)} == {11, 510}
    assert {task.train(i).fields["task_id"] for i in range(4)} == {1, 511, 601, 974}
    # a file with one side of it is split by its questions
    task = read(tmp_path, [problem(number) for number in range(601, 700)])
    assert 1 < task.num_held_out < 30


def test_a_held_out_question_is_not_trained_on_under_another_number(tmp_path: Path) -> None:
    said = list[str]()

    class Listening(SilentListener):
        def warn(self, text: str) -> None:
            said.append(text)

    again = {**problem(700), "text": problem(12)["text"]}
    path = write_lines(tmp_path / "mbpp.jsonl", [problem(12), problem(701), again])
    task = load_task("code", seed=0, data=str(path), listener=Listening())
    assert [task.train(i).fields["task_id"] for i in range(2)] == [701, 701]
    assert [x for x in said if "1 lines for training ask what a held-out line asks" in x]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"text": ""}, "text is str ''"),
        ({"text": None}, "text is NoneType"),
        ({"code": 7}, "code is int '7'"),
        ({"test_list": []}, "test_list has no test"),
        ({"test_list": "assert f(1)"}, "test_list must be a list of texts, is str"),
        ({"test_list": ["assert f("]}, "a test is not Python: str 'assert f('"),
        ({"test_list": ["assert f(1)", ""]}, "a test tests nothing: str ''"),
        ({"test_list": ["# f(1)"]}, "a test tests nothing: str '# f(1)'"),
        ({"challenge_test_list": ["pass"]}, "a test tests nothing: str 'pass'"),
        ({"prefix": 5}, "prefix must be text, is int '5'"),
        ({"challenge_test_list": [1]}, "challenge_test_list must be a list of texts"),
        ({"test_setup_code": "import"}, "the setup is not Python"),
        ({"test_setup_code": 1}, "test_setup_code must be text, is int"),
        ({"text": "\ud800"}, "text has half of a surrogate pair"),
    ],
)
def test_a_line_that_is_no_problem_is_named(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match="--data .*mbpp.jsonl, line 2: ") as error:
        read(tmp_path, [problem(700), problem(11, **changed)])
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("So:\n```python\nx = 1\n```\nThen ```python\ny\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("``` Python \r\nx\r\n```", "x\r\n"),
        ("```bash\nls\n```\nThen\n```python\nx\n```", "x\n"),
        ("```json\n{}\n```\n```python title=a.py\nx\n```", "x\n"),
        ("<think>```python\ndraft\n```</think>\n```python\nx\n```", "x\n"),
        ("```py\nx = 1\ny", "x = 1\ny"),
        ("Run ```bash\nls\n```: ```python\nx\n```", "x\n"),
        ("", ""),
    ],
)
def test_code_is_the_first_block_or_the_whole_text(text: str, code: str) -> None:
    assert code_of(text) == code


@linux
def test_the_parts_are_all_tests_passed_and_the_share_of_them(tmp_path: Path) -> None:
    challenge = {"challenge_test_list": ["assert add(7) == 707", "assert add(8) == 0"]}
    task = read(tmp_path, [problem(11), problem(700, **challenge)])
    asked = [task.train(0), task.held_out(0)]
    texts = [
        ["```python\ndef add(x): return x + 700\n```", "def add(x): return 701", "import"],
        [task.held_out(0).answer, "def add(x): raise SystemExit", ""],
    ]
    table = RewardScorer(task, workers=2).score(asked, texts)
    assert table.parts["passed"].tolist() == [[1, 0, 0], [1, 0, 0]]
    assert table.parts["tests"].tolist() == [[1, 0.5, 0], [1, 0, 0]]
    # measured and not paid; NaN for the problem without any
    np.testing.assert_array_equal(table.parts["challenge"], [[0.5, 0, 0], [np.nan] * 3])
    assert table.total.tolist() == [[1.5, 0.25, 0], [1.5, 0, 0]]


@linux
def test_a_wrong_completion_is_explained_by_the_first_test_that_fails() -> None:
    tests = ["assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 4"]
    example = Example("", "", fields={"test_list": tests})
    asked = with_confidence(CodeTask(), seed=0, chat=False, supervised=False)
    for task, form in ((CodeTask(), "{}"), (asked, write("{}", 0.5, chat=False))):
        right, wrong = (form.format(f"def f(x):\n    return {x}") for x in ("x + 1", "2"))
        assert task.explain(example, right) == ""
        assert task.explain(example, wrong) == "2 of 3 tests fail: assert f(2) == 3"
    assert asked.explain(example, "2") == "the form of the confidence does not match"


@linux
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"test_imports": ["import numpy"]}, "2 of 2 tests fail: assert add(1) =="),
        ({"test_list": ["assert add(1) == 0"]}, "1 of 1 tests fail: assert add(1) == 0"),
    ],
)
def test_problems_whose_own_code_fails_are_said_before_a_run_starts(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """No completion is ever paid there, because the sandbox lacks what it needs, or by mistake."""
    warnings = list[str]()

    class Listening(SilentListener):
        def warn(self, text: str) -> None:
            warnings.append(text)

    rows = [problem(number) | changes for number in range(601, 700)]
    path = write_lines(tmp_path / "mbpp.jsonl", rows)
    load_task("code", seed=0, data=str(path), timeout_s=2.0, listener=Listening())
    assert bool(warnings) == bool(said)
    if said:
        assert "the code of 3 of the 3 problems that were run does not pass" in warnings[0]
        assert said in warnings[0]


@linux
def test_a_run_says_which_problems_are_held_out(tmp_path: Path) -> None:
    """A user's own numbers, from 1 on, give most of a file to MBPP's test split."""
    task = read(tmp_path, [problem(number) for number in range(1, 31)])
    assert task.about.startswith(
        "20 examples are held out (MBPP's test split, task_id 11 to 510); "
    )
    task = read(tmp_path, [problem(number) for number in range(601, 700)])
    assert f"{task.num_held_out} examples are held out (one prompt in 10)" in task.about


@linux
def test_a_setup_and_imports_run_before_the_tests() -> None:
    fields = {
        "test_list": ["assert math.isclose(half(root), 0.5)"],
        "test_setup_code": "root = Node(1)",
        "test_imports": ["import math"],
    }
    code = "class Node:\n  def __init__(self, x): self.x = x\ndef half(node): return node.x / 2"

    class Task(CodeTask):
        pass

    assert Task().score(Example("?", code, fields=fields), code)["passed"] == 1


@linux
def test_code_that_cannot_be_run_at_all_ends_the_run_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: object) -> list[bool]:
        raise SandboxError("no more processes")

    monkeypatch.setattr("minigrpo.tasks.code.run_tests", refuse)
    task = OneLiners(0, 3.0)
    with pytest.raises(ConfigError, match="--task code: no more processes"):
        RewardScorer(task).score([task.train(0)], [["x"]])
    monkeypatch.setattr("minigrpo.sandbox.workers.Sandbox.describe", refuse)
    with pytest.raises(ConfigError, match="--task code: no more processes"):
        print(task.about)


# --- one-line functions -------------------------------------------------------------------------


def test_one_liners_are_seeded_and_split_by_function() -> None:
    task, again, other = OneLiners(0, 3.0), OneLiners(0, 3.0), OneLiners(1, 3.0)
    train = [task.train(number) for number in range(300)]
    held_out = [task.held_out(number) for number in range(300)]
    assert [again.train(number) for number in range(300)] == train
    assert [other.train(number).prompt for number in range(300)] != [x.prompt for x in train]
    assert not {x.prompt for x in train} & {x.prompt for x in held_out}
    assert {x.kind for x in train} == {x.kind for x in held_out} == set(KINDS)
    assert len({x.prompt for x in held_out}) > 5


@linux
def test_a_function_that_fits_the_examples_passes_and_a_table_of_them_does_not() -> None:
    task = OneLiners(0, 3.0)
    example = task.train(0)
    shown = dict(text[2:].split(")=") for text in example.prompt.split("\n")[0].split())
    right, table = example.fields["code"], f" return int({shown}[str(x)])"
    scores = task.score_batch([example] * 4, [right, right + " # ", table, " return"])
    assert scores["passed"].tolist() == [1, 1, 0, 0]
    assert scores["tests"][2] == pytest.approx(len(SHOWN) / len(SHOWN + HIDDEN))


@linux
def test_the_warm_start_is_taught_python_and_not_the_answer() -> None:
    task = OneLiners(0, 3.0)
    examples = [task.train(number) for number in range(30)]
    for example in examples:
        compile(example.fields["prefix"] + example.answer, "answer", "exec")
    passed = task.score_batch(examples, [x.answer for x in examples])["passed"]
    assert passed.mean() < 0.2


@linux
def test_the_shipped_model_writes_functions_that_pass_the_first_example() -> None:
    config = Config.of(task="code", device="cpu")
    _, model = load_model("shipped", pytest.fail, task="code")
    task = OneLiners(5, 3.0)
    examples = [task.held_out(number) for number in range(16)]
    texts = answer(Sampler(config, model.eval(), make_tokenizer(config)), examples)
    first = [re.match(r"f\(0\)=([0-9]+) ", example.prompt) for example in examples]
    found = [
        re.fullmatch(rf" return {one[1]}\+[1-9]\*x(\*x)?", text)
        for one, text in zip(first, texts, strict=True)
        if one
    ]
    assert len(found) == 16 and sum(map(bool, found)) > 12


# --- runs ---------------------------------------------------------------------------------------


@linux
@pytest.mark.slow
def test_the_preset_for_mbpp_makes_a_step_on_a_small_qwen2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    rows = [problem(number) for number in (11, 12, *range(601, 620))]
    values = read_settings(Config, ROOT / "configs" / "mbpp-2xv100.toml")
    values |= {
        "init_from": str(write_model(tmp_path / "model", context=700)),
        "data": str(write_lines(tmp_path / "mbpp.jsonl", rows)),
        "out_dir": str(tmp_path / "run"),
        "amp_dtype": "bfloat16",  # float16 needs a CUDA device
        "prompts_per_step": 2,
        "rollout_batch_size": 1,
        "group_size": 2,
        "max_new_tokens": 4,
        "max_steps": 1,
        "eval_size": 2,
        "eval_samples": 2,
        "eval_every": 0,
        "device": "cpu",
    }
    Trainer(Config.of(**values)).fit()
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["rewards/passed/mean"] == 0
    assert metrics.get("rewards/challenge/mean") is None  # no problem has such tests
    evaluations = (tmp_path / "run" / "eval.jsonl").read_text().splitlines()
    assert list(json.loads(evaluations[-1]))[:4] == ["step", "n", "passed_sampled", "passed"]
    assert json.loads(evaluations[-1])["pass@2"] == 0
    summary = (tmp_path / "run" / "job_summary.txt").read_text()
    assert "job        4711" in summary and "steps      1, of which 0" in summary
    assert "passed, sampled: 0.000 before, 0.000 after, n = 2" in summary
    assert "code execution: " in capsys.readouterr().out


def test_a_slurm_job_leaves_a_summary_in_plain_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = ({"n": 8, "passed_sampled": x, "passed": 0.0} for x in (0.125, 0.5))
    summary = {
        "status": "stopped",
        "exit_reason": "SIGTERM",
        "step": 30,
        "wall_seconds": 3725.4,
        "skipped_steps": 2,
        "first_evaluation": first,
        "last_evaluation": last,
    }
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    warned = list[str]()
    write_job_summary(tmp_path, summary, 2, warned.append)
    assert not list(tmp_path.iterdir())
    for name, value in (("JOB_ID", "7"), ("JOB_NODELIST", "n1"), ("RESTART_COUNT", "1")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    write_job_summary(tmp_path, summary, 2, warned.append)
    assert (tmp_path / "job_summary.txt").read_text().splitlines() == [
        "job        7, restart 1",
        "nodes      n1, 2 processes",
        "status     stopped (SIGTERM)",
        "steps      30, of which 2 were skipped",
        "time       1:02:05",
        "held out   passed, sampled: 0.125 before, 0.500 after, n = 8",
    ]
    write_job_summary(tmp_path, {**summary, "last_evaluation": {**last, "n": 40}}, 2, warned.append)
    assert "n = 8 before, 40 after" in (tmp_path / "job_summary.txt").read_text()
    write_job_summary(tmp_path / "none", summary, 2, warned.append)
    assert len(warned) == 1 and "job_summary.txt: NOT WRITTEN" in warned[0]


def test_other_systems_are_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ValueError, match="--task code: .* runs on Linux only"):
        load_task("code", seed=0)


def test_the_time_limit_of_a_completion_is_the_setting() -> None:
    config = Config.of(task="code", reward_timeout=7.5)
    assert Config.of(task="code").task.reward_timeout == 3.0
    task = replace(config.task, name="code")
    assert load_task("code", seed=0, timeout_s=task.reward_timeout).timeout_s == 7.5  # type: ignore[attr-defined]
