"""Tasks, data and rewards that a user brings, tested with the files in examples/."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from minigrpo import Config, Trainer
from minigrpo.tasks.pairs import Pairs
from minigrpo.tasks.registry import load_rewards, load_task, shipped_model

from .gradients import TINY

ROOT = Path(__file__).parent.parent
SUMS, REVERSE, REWARDS = (
    str(ROOT / "examples" / name) for name in ("sums.jsonl", "reverse.py", "rewards.py")
)


def run(folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """Train for a few steps, and return the metrics."""
    options = {
        **TINY,
        "reward_weights": "",
        "max_steps": 2,
        "eval_every": 0,
        **changes,
        "out_dir": str(folder),
    }
    Trainer(Config.of(**options), quiet=True).fit()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("loss", ["grpo", "nll"])
def test_a_task_in_a_python_file(tmp_path: Path, loss: str) -> None:
    metrics = run(tmp_path / "run", task=REVERSE, max_new_tokens=12, loss=loss)
    assert len(metrics) == 2
    if loss == "grpo":
        assert {"rewards/exact/mean", "rewards/similarity/mean", "rewards/exact/failures"} <= set(
            metrics[0]
        )
    evaluation = json.loads((tmp_path / "run" / "eval.jsonl").read_text().splitlines()[0])
    assert {"exact", "exact_sampled", "similarity"} <= set(evaluation)


def test_pairs_from_a_file_with_reward_functions(tmp_path: Path) -> None:
    metrics = run(tmp_path / "run", data=SUMS, rewards=REWARDS, max_new_tokens=8)
    assert {"rewards/exact/mean", "rewards/close/mean", "rewards/brevity/mean"} <= set(metrics[0])
    assert metrics[0]["rewards/close/failures"] > 0  # a random model writes no numbers
    assert metrics[0]["rewards/brevity/failures"] == 0
    assert metrics[0]["rewards/brevity/mean"] > 0


def test_weights_in_toml_choose_among_the_parts_of_task_and_functions(tmp_path: Path) -> None:
    toml = tmp_path / "config.toml"
    toml.write_text(f'data = "{SUMS}"\nrewards = "{REWARDS}"\n[reward_weights]\nbrevity = 2\n')
    config = Config.from_toml(toml)
    metrics = run(
        tmp_path / "run",
        data=config.task.data,
        rewards=config.task.rewards,
        reward_weights=config.task.reward_weights,
        max_new_tokens=8,
    )
    assert metrics[0]["reward"] == pytest.approx(2 * metrics[0]["rewards/brevity/mean"], rel=1e-5)


def test_pairs_are_split_by_prompt_and_each_epoch_has_its_own_order() -> None:
    pairs = Pairs([Path(SUMS)], seed=3)
    n = 600 - pairs.num_held_out
    epochs = [[pairs.train(epoch * n + i).prompt for i in range(n)] for epoch in range(2)]
    held_out = {pairs.held_out(i).prompt for i in range(pairs.num_held_out)}
    assert len(held_out) == pairs.num_held_out > 30
    assert sorted(epochs[0]) == sorted(epochs[1]) and epochs[0] != epochs[1]
    assert len(set(epochs[0])) == n and not held_out & set(epochs[0])
    same = Pairs([Path(SUMS)], seed=3)
    assert epochs[0] == [same.train(i).prompt for i in range(n)]
    assert pairs.train(5).index != pairs.train(n + 5).index  # so that it is sampled anew


def test_copies_of_a_question_by_blanks_or_unicode_form_are_in_one_split(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    forms = ("caf\u00e9 {}  ?", "cafe\u0301 {} ?\n", " caf\u00e9\t{} ?")
    lines = [{"prompt": form.format(i), "answer": "b"} for i in range(100) for form in forms]
    path.write_text("\n".join(map(json.dumps, lines)))
    pairs = Pairs([path], seed=0)

    def numbers(prompts: Iterable[str]) -> set[str]:
        return {"".join(filter(str.isdigit, prompt)) for prompt in prompts}

    held_out = numbers(pairs.held_out(i).prompt for i in range(pairs.num_held_out))
    trained = numbers(pairs.train(i).prompt for i in range(300 - pairs.num_held_out))
    assert len(held_out) > 2 and len(held_out) + len(trained) == 100 and not held_out & trained


def test_prompts_take_turns_and_a_test_file_is_held_out_whole(tmp_path: Path) -> None:
    def write(name: str, numbers: Iterable[int]) -> str:
        lines = (json.dumps({"prompt": f"{i}", "answer": f"{i % 7}"}) for i in numbers)
        (tmp_path / name).write_text("\n".join(lines))
        return str(tmp_path / name)

    a, b = write("a.jsonl", range(40)), write("b.jsonl", range(40, 80))
    test = write("my-test.jsonl", range(75, 95))

    def prompts(data: str) -> tuple[set[int], set[int]]:
        task = load_task("prompts", seed=0, data=data)
        held_out = {int(task.held_out(i).prompt) for i in range(task.num_held_out or 0)}
        train = {int(task.train(i).prompt) for i in range(200)}
        assert f"{len(held_out)} examples are held out (" in str(getattr(task, "about", ""))
        return train, held_out

    train, held_out = prompts(f"{a},{b}")
    assert train | held_out == set(range(80)) and not train & held_out and len(held_out) < 20
    assert prompts(f"{a},{b},{test}") == (set(range(75)), set(range(75, 95)))
    train, held_out = prompts(test)  # nothing else is there to train on
    assert train and train | held_out == set(range(75, 95)) and not train & held_out
    with pytest.raises(ValueError, match="0 usable .* a line must be .*; --task prompts reads"):
        load_task("math", seed=0, data=a)
    with pytest.raises(ValueError, match="--task prompts needs --data FILE.jsonl"):
        load_task("prompts", seed=0)
    with pytest.raises(ValueError, match="shipped: no model ships for --task prompts"):
        shipped_model("prompts")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "a"}', "line 1: must be an object like"),
        ('{"prompt": "a", "answer": "b"}\n\nnot json', "line 3: must be"),
        ('{"prompt": "", "answer": "b"}', "line 1: prompt and answer must be text"),
        ('{"prompt": "a", "answer": 3}', "line 1: prompt and answer must be text"),
        ('["prompt", "answer"]', "line 1: must be"),
        ('{"prompt": "a", "answer": "b"}', "no pair for"),
        ("", "no pair for training"),
    ],
)
def test_a_bad_line_of_data_is_named(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"--data .*data.jsonl.*{words}"):
        load_task("chess-env", seed=0, data=str(path))


def test_text_with_unusual_line_ends_stays_in_its_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [
        json.dumps({"prompt": f"{i}\u2028\x85", "answer": "a"}, ensure_ascii=False)
        for i in range(40)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    pairs = Pairs([path], seed=0)
    assert len(pairs.train(0).prompt.strip("0123456789")) == 2


def test_a_task_file_may_have_dataclasses_and_postponed_annotations(tmp_path: Path) -> None:
    head = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Word:
    text: str
"""
    (tmp_path / "mine.py").write_text(head + Path(REVERSE).read_text())
    assert load_task(str(tmp_path / "mine.py"), seed=0).train(0).prompt.endswith("=")


def test_what_cannot_be_loaded_is_one_line_that_names_the_flag(tmp_path: Path) -> None:
    broken, empty, unlucky = (tmp_path / f"{name}.py" for name in ("broken", "empty", "unlucky"))
    broken.write_text("import nothing_of_that_name")
    empty.write_text("x = 1")
    unlucky.write_text("""
class A:
    parts = {}
    train = held_out = score = None
    def __init__(self, seed):
        raise RuntimeError("no luck")
""")
    none, leaves = tmp_path / "nothing.py", tmp_path / "leaves.py"
    none.write_text("""
class A:
    parts = {"similarity": 1}
    score = None
    def __init__(self, seed):
        pass
    def train(self, n):
        pass
    held_out = train
""")
    leaves.write_text("raise SystemExit(0)")
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"task": "chess"},
            "--task must be chess-env, best-move, chess-env.best-move, .*or a Python file",
        ),
        (
            {"task": str(tmp_path / "none.py")},
            "--task .*none.py: must be a Python file that exists",
        ),
        ({"task": str(broken)}, "--task .*broken.py: ModuleNotFoundError"),
        ({"task": str(empty)}, "--task .*empty.py: must have one class with parts, .* has none"),
        ({"task": str(unlucky)}, "--task .*unlucky.py: A: RuntimeError: no luck"),
        (
            {"task": str(none)},
            "--task .*nothing.py: A: train.0.: must return a minigrpo.types.Example, got NoneType",
        ),
        ({"rewards": str(leaves)}, "--rewards .*leaves.py: SystemExit: 0"),
        ({"data": str(tmp_path / "none.jsonl")}, "--data .*none.jsonl: cannot be read"),
        ({"data": "games.doc"}, "must end with .pgn, .pgn.gz, .txt, .jsonl, got games.doc"),
        (
            {"data": SUMS, "task": REVERSE},
            "--data goes with chess-env, best-move, chess-env.best-move, .*got --task",
        ),
        ({"rewards": str(empty)}, "--rewards .*empty.py: has no function decorated"),
        ({"rewards": str(tmp_path)}, "--rewards .*: must be a Python file that exists"),
        (
            {"reward_weights": "exact_fen=1,typo=2"},
            "--reward-weights: no part typo; allowed: exact_fen, similarity",
        ),
    ]
    for changes, words in cases:
        with pytest.raises(ValueError, match=words) as error:
            Trainer(Config.of(**{**TINY, **changes, "out_dir": str(tmp_path / "run")}), quiet=True)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_the_decorated_functions_of_a_file() -> None:
    assert [(f.name, f.weight, f.batched) for f in load_rewards(REWARDS)] == [
        ("close", 0.5, False),
        ("brevity", 0.1, True),
    ]
    assert load_rewards("") == []


def test_a_run_that_learns_nothing_warns_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path / "run", data=SUMS, reward_weights="exact=1", max_steps=24, max_new_tokens=4)
    assert (
        capfd.readouterr().err.count(
            "for 20 steps all completions of each prompt had equal rewards"
        )
        == 1
    )
