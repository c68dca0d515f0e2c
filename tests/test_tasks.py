"""Tasks by name, from files and from a user's code: which arguments they take, what they supply."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigrpo import Config
from minigrpo.build import resolve
from minigrpo.task import Task
from minigrpo.tasks.loading import TASKS, load_task, named_class
from minigrpo.types import ConfigError, Example

from .tiny import ROOT, SUMS, ask, golden, refused

FILES = ["calibration", "countdown", "fields", "functions", "one_liners", "reverse", "rlt", "sums"]
EXAMPLES = {name: str(ROOT / "examples" / f"{name}.py") for name in FILES}


class Capitals(Task):
    """A user's own class: one prompt, which is never numbered."""

    reward_weights: Mapping[str, float] = {"right": 1.0}
    success = "right"
    num_held_out = 1
    about = "a capital"

    def __init__(self, seed: int, city: str = "Paris", **others: Any) -> None:
        self.seed, self.city, self.others = seed, city, others

    def train(self, number: int) -> Example:
        messages = ask("France?")
        return Example("", self.city, messages=messages)

    held_out = train

    def score(self, example: Example, text: str) -> dict[str, float]:
        return {"right": float(text == self.city)}

    def summaries(self, values: Mapping[str, np.ndarray]) -> Mapping[str, float]:
        return {"sum": values["right"].sum()}


def test_examples_are_those_that_the_shipped_models_were_trained_on() -> None:
    """Golden: made at d29bab8."""
    answers_of = golden("tasks")
    assert len(answers_of) == 11
    for key, expected in answers_of.items():
        name, seed, _ = key.split("/")
        name = {"countdown": "countdown_sft", "code": "one_liners", "math": "sums"}.get(name, name)
        task = load_task(name if name in TASKS else f"examples/{name}.py", seed=int(seed))
        examples = [task.train(0), task.train(7), task.held_out(3)]
        made = [
            [x.prompt, x.fields.get("true_answer", x.answer), x.kind, x.index] for x in examples
        ]
        assert made == expected, key


@pytest.mark.parametrize("name", [*EXAMPLES.values()])
def test_examples_are_functions_of_seed_and_number_and_the_splits_are_disjoint(name: str) -> None:
    task, again, other = (load_task(name, seed=seed) for seed in (3, 3, 4))
    train, held_out = ([get(i) for i in range(150)] for get in (task.train, task.held_out))
    assert not {x.prompt for x in train} & {x.prompt for x in held_out}
    assert train[::-1] == [again.train(i) for i in reversed(range(150))]
    assert [x.prompt for x in train] != [other.train(i).prompt for i in range(150)]
    assert [x.index for x in train] == list(range(150))
    assert task.success in task.reward_weights and task.about


SCORED = [EXAMPLES[name] for name in ("calibration", "countdown", "fields", "reverse", "sums")]


@pytest.mark.parametrize("name", ["chess-env", *SCORED])
@settings(max_examples=40)
@given(
    text=st.text(
        "0123456789+-*/()=$\\{}<>#,. \nboxedtims</think><confidence>0.5</confidence>\ud800",
        max_size=60,
    )
    | st.text()
    | st.sampled_from(["+" * 1000, "8/8/8/8/8/8/8/8 b KQkq e3 0 1+١.001+0+0"])
)
def test_any_text_has_a_score_for_every_reward(name: str, text: str) -> None:
    task = load_task(name, seed=0)
    for chat in (False, True):
        example = load_task(name, seed=0, chat=chat).train(5)
        scores = task.score(example, text)
        assert {*scores} == {*task.reward_weights} and all(0 <= x <= 1 for x in scores.values())


@pytest.mark.parametrize("name", ["fields", "functions", "sums"])
def test_a_true_answer_is_right(name: str) -> None:
    task = load_task(EXAMPLES[name], seed=0)
    for example in map(task.held_out, range(4)):
        assert task.score(example, example.answer)[task.success] == 1


def test_every_built_in_task_can_be_made_and_chess_alone_ships_a_model() -> None:
    for name in TASKS:
        named_class(name)
        if name == "chess-env":
            resolve(Config.of(task=name))
        else:
            refused(resolve, Config.of(task=name))


def test_a_class_is_called_with_the_arguments_that_it_names() -> None:
    class Narrow(Capitals):
        def __init__(self, city: str = "Oslo", size: str = "1") -> None:
            super().__init__(7, city)
            self.size = int(size)

    made = load_task(Narrow, seed=3, args={"size": "12"})
    own = made.source
    assert (own.seed, own.city, own.size) == (7, "Oslo", 12)
    every = load_task(Capitals, seed=3, data=SUMS, args={"city": "Rome", "other": 1})
    own = every.source
    assert (own.city, own.others) == ("Rome", {"other": 1, "data": [Path(SUMS)]})
    wrong = [
        (Narrow, {"args": {"number": "3"}}),
        (Narrow, {"args": {"size": "many"}}),
        (Narrow, {"eval_data": SUMS}),
        (EXAMPLES["countdown"], {"args": {"difficulty": "2x3"}}),
        ("math", {"args": {"student": "x"}}),
        (Capitals(0), {"args": {"student": "x"}}),
    ]
    for task, changes in wrong:
        with pytest.raises((TypeError, ValueError)):
            load_task(task, seed=0, **changes)


@pytest.mark.parametrize("make", [lambda: Capitals, lambda: Capitals(3)], ids=["class", "object"])
def test_a_users_task_keeps_all_that_it_says(make: Any) -> None:
    task = load_task(make(), seed=3)
    for name in (
        "reward_weights",
        "success",
        "num_held_out",
        "about",
        "token_rewards",
        "speculate",
    ):
        assert getattr(task, name) == getattr(Capitals, name)
    assert not task.known() and task.summaries({"right": np.ones(2)}) == {"sum": 2}
    assert task.score(task.train(0), "Paris") == {"right": 1}
    # the key of an example's random numbers, which this task leaves at 0
    assert [task.train(i).index for i in (0, 5, 9)] == [0, 5, 9] and task.held_out(4).index == 4
    assert task.train(5).prompt == "France?"  # of the messages, for logs


def test_what_is_no_task_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("x = 1")
    (tmp_path / "two.py").write_text("class A:\n    train = 1\nclass B(A): pass")
    names = ("chess", "nowhere.py", "", f"{tmp_path}/empty.py", f"{tmp_path}/two.py")
    for task in (*names, Example, Example("?")):  # no subclass of Task
        with pytest.raises((ConfigError, OSError)):
            load_task(task, seed=0)
