"""Countdown: a verifier that cannot be tricked, problems, warm-start texts, and runs."""

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minigrpo import Config, Trainer
from minigrpo.runtime.rng import stream
from minigrpo.tasks import countdown
from minigrpo.tasks.arithmetic import MAX_CHARS, MAX_DEPTH, evaluate, result
from minigrpo.tasks.attempts import LARGEST_VALUE, random_attempt, random_equation, random_search
from minigrpo.tasks.countdown import FORMS, Countdown, CountdownFiles, final_answer, solves
from minigrpo.tasks.registry import shipped_model
from minigrpo.tasks.task_request import TaskRequest

from .gradients import TINY

NUMBERS = st.integers(0, 99).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " + ", " /"]), inner).map("".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"-{text}"),
    ),
    max_leaves=12,
)


def python_value(text: str) -> Fraction | None:
    """What Python makes of an expression, in exact fractions; None if that is no number."""
    try:
        value = eval(re.sub("[0-9]+", r"Fraction('\g<0>')", text), {"Fraction": Fraction})
    except (SyntaxError, TypeError, ZeroDivisionError):
        return None
    return value if isinstance(value, Fraction) else None


def own_value(text: str) -> Fraction | None:
    try:
        return evaluate(text).value
    except ValueError:
        return None


@given(EXPRESSIONS)
@example("1/49*49")
@example("8-4-2")
@example("8/4/2")
@example("2-3*4")
@example("-2*-3")
@example("1/(2-2)")
def test_an_expression_is_worth_what_python_says(text: str) -> None:
    assert own_value(text) == python_value(text)
    if own_value(text) is not None:
        assert evaluate(text).numbers == tuple(map(int, re.findall("[0-9]+", text)))


@given(st.text("0123456789+-*/() ", max_size=12))
@example("3**2")
@example("7//2")
@example("+3")
@example("3(4)")
@example("()")
@example("1 2")
@example("007")
def test_any_text_of_these_characters_is_a_value_or_nothing(text: str) -> None:
    """What Python has and the grammar has not is refused: **, //, unary plus, leading zeros."""
    not_in_grammar = re.search(r"\*\s*\*|/\s*/|(?:^|[-+*/(])\s*\+|(?<![0-9])0[0-9]", text)
    expected = None if not_in_grammar else python_value(text.strip())
    too_long = any(len(number) > 9 for number in re.findall("[0-9]+", text))
    assert own_value(text) == (None if too_long else expected)


HOSTILE = [
    "",
    "\x00",
    "\ud800",
    "4+٣",  # an Arabic digit, which int() reads
    "1_0",
    "1e1",
    "0x10",
    "3.0",
    "9**9**9**9",
    "__import__('os').abort()",
    "(" * 100_000 + "1" + ")" * 100_000,
    "-" * 390 + "1",
    "9" * 1_000_000,
    "1/" * 150 + "3",
    "*".join(["999999999"] * 39),
    "1/0",
    "1/(1-1)",
    "<answer>" * 100_000,
    "</answer>" * 100_000 + "<answer>",
    "\n" * 1_000_000,
    "1," * 199 + "1",
    "1=" * 199 + "1",
    "=",
    ",",
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12].encode("unicode_escape"))
def test_hostile_text_is_no_answer_and_costs_nothing(text: str) -> None:
    for wrapped in (text, f"<answer>{text}</answer>"):
        assert not solves(wrapped, [3, 4, 5], 35)


@given(st.text("0123456789+-*/()=, \n<answer>", max_size=60))
def test_any_text_is_judged(text: str) -> None:
    assert solves(text, [3, 4], 12) in (True, False)


def test_the_limits_are_as_stated() -> None:
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH).value == 1
    for text in ("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1), "1+" * MAX_CHARS + "1"):
        with pytest.raises(ValueError, match="must have at most"):
            evaluate(text)


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("(4+3)*5", 35),
        ("5 * (3 + 4) = 35", 35),
        ("(4+3)*5=7*5=35", 35),
        ("4+3=7,7*5=35", 35),
        ("4+3=7, 5*7", 35),
        ("3/(4-5)", -3),
        ("-3+4+5", 6),
        ("5/(4+3)", Fraction(5, 7)),
        ("(4+3)*5=36", None),  # not true
        ("4+3=8,8*5=40", None),
        ("35", None),  # not with the numbers
        ("35=(4+3)*5", None),
        ("4+3", None),  # 5 is left over
        ("4+3=7", None),
        ("4+3=7,5*5=25", None),  # 5 twice, and 7 left over
        ("4+3=7,4*5=20", None),  # 4 is used up
        ("4+3+5+5", None),
        ("45-3", None),  # digits put together
        ("4+3=7,7*5=35,", None),
        ("4+3=7 7*5=35", None),
    ],
)
def test_an_answer_uses_each_number_once_and_its_equations_hold(
    answer: str, value: int | None
) -> None:
    assert result(answer, [3, 4, 5]) == value
    assert solves(answer, [3, 4, 5], 35) == (value == 35)


def test_numbers_count_as_often_as_they_are_given() -> None:
    assert solves("6*6", [6, 6], 36)
    assert not solves("6*6", [6, 6, 6], 36) and not solves("6*6", [6], 36)
    assert solves("6+6=12,12+6=18,18+12=30", [6, 6, 6, 12], 30)  # 12 is given, and a result
    assert not solves("6+6=12,12+12=24", [6, 6], 24)


def test_the_last_tags_count_else_the_last_line() -> None:
    texts = {
        "<think>12*3?</think>\n<answer>(4+3)*5</answer>": "(4+3)*5",
        "<answer>1</answer> no, <answer>\n(4+3)*5\n</answer> and so on": "(4+3)*5",
        "4*3=12,12+5=17\n4+3=7,7*5=35\n": "4+3=7,7*5=35",
        "4*5=20,20-3=17<4+3=7,7*5=35": "4+3=7,7*5=35",
        "4*5=20,20-3=17<": "",
        "(4+3)*5": "(4+3)*5",
        "(4+3)*5\n<answer>": "",  # cut off before the answer
        "(4+3)*5\n</answer>": "",
        "</answer>(4+3)*5<answer>": "",
        "<answer>1+2</answer> <answer>(4+3)*5": "1+2",
    }
    assert {text: final_answer(text) for text in texts} == texts


# --- problems and warm-start texts ----------------------------------------------------------------


@given(st.integers(0, 2**32), st.lists(st.integers(1, 100), min_size=2, max_size=6))
def test_random_attempts_state_true_values(seed: int, numbers: list[int]) -> None:
    attempt = random_attempt(stream(seed, "attempt"), numbers)
    assert result(attempt.steps, numbers) == result(attempt.expression, numbers) == attempt.value
    assert 0 < attempt.value <= LARGEST_VALUE
    lines = re.split("[<>]", random_search(stream(seed, "search"), numbers, 7))
    assert len(set(lines)) == len(lines)
    assert all(result(line, numbers) is not None for line in lines)
    assert result(random_equation(stream(seed, "equation"), numbers, 7), numbers) is not None


def test_all_ways_are_tried_where_numbers_cannot_be_combined_within_the_limit() -> None:
    for numbers in ([0, 0], [0, 7, 0], [999, 1, 0]):
        for seed in range(20):
            attempt = random_attempt(stream(seed, "attempt"), numbers)
            assert result(attempt.steps, numbers) == attempt.value


def test_problems_depend_on_seed_and_number_and_the_splits_share_none() -> None:
    task = Countdown(3, difficulty="2x6,3x20")
    train = [task.train(number) for number in range(400)]
    held_out = [task.held_out(number) for number in range(400)]
    again = Countdown(3, difficulty="2x6,3x20")
    assert train == [again.train(number) for number in range(400)]
    assert train != [Countdown(4, difficulty="2x6,3x20").train(number) for number in range(400)]

    def problems(examples: list[Any]) -> set[tuple[Any, ...]]:
        return {(*sorted(x.fields["nums"]), x.fields["target"]) for x in examples}

    assert not problems(train) & problems(held_out)
    kinds = [x.kind for x in train]
    assert 160 < kinds.count("2 numbers up to 6") < 240
    assert set(kinds) == {"2 numbers up to 6", "3 numbers up to 20"}
    assert all(len(x.fields["nums"]) == int(x.kind[0]) for x in train + held_out)


def test_a_warm_start_search_ends_at_a_hit_and_finds_one_only_by_chance() -> None:
    task = Countdown(0, difficulty="3x12")
    examples = [task.train(number) for number in range(500)]
    first = 0
    for x in examples:
        values = [result(line, x.fields["nums"]) for line in re.split("[<>]", x.answer)]
        assert x.fields["target"] not in values[:-1]
        first += values[0] == x.fields["target"]
    rng = stream(0, "test")
    values = [random_attempt(rng, x.fields["nums"]).value for x in examples]
    chance = sum(value == x.fields["target"] for value, x in zip(values, examples, strict=True))
    assert abs(first - chance) < 25 and 10 < chance < 100


@pytest.mark.parametrize("text", ["3", "3x", "x", "1x12", "7x12", "3x0", "3x101", "3x12,", "3x١2"])
def test_a_bad_difficulty_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="^--difficulty must read COUNTxLARGEST"):
        countdown.parse_levels(text)


def test_each_form_asks_in_its_own_way() -> None:
    asked = {name: Countdown(0, name, "3x12").train(0) for name in FORMS}
    numbers, target = asked["chat"].fields["nums"], asked["chat"].fields["target"]
    short = f"{' '.join(map(str, sorted(numbers, reverse=True)))} -> {target}\n"
    assert asked["search"].prompt == asked["expression"].prompt == short
    (message,) = asked["chat"].messages
    assert message == {"role": "user", "content": asked["chat"].prompt}
    assert all(str(number) in message["content"] for number in (*numbers, target))
    assert "<answer>" in message["content"]


# --- files ----------------------------------------------------------------------------------------


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_fields_own_format_is_read(tmp_path: Path) -> None:
    records = [{"target": 10 + n, "nums": [n, 4, 6], "id": f"{n}"} for n in range(60)]
    path = write(tmp_path / "a.jsonl", *records)
    task = CountdownFiles(TaskRequest("countdown", 0, str(path)), form="chat")
    found = [task.train(n) for n in range(60 - task.num_held_out)]
    assert sorted(x.fields["id"] for x in found) != [] and found[0].messages
    assert all(solves(f"{x.fields['nums'][0]}+4+6", **renamed(x.fields)) for x in found)
    scores = task.score_batch(
        found[:2], [f"<answer>4+6+{found[0].fields['nums'][0]}</answer>", "4+6"]
    )
    assert scores["solved"].tolist() == [1, 0] and scores["format"].tolist() == [1, 0]


def renamed(fields: Any) -> dict[str, Any]:
    return {"numbers": fields["nums"], "target": fields["target"]}


def test_a_problem_is_on_one_side_in_whatever_order_its_numbers_stand(tmp_path: Path) -> None:
    orders = [[1, 2, 3], [3, 1, 2], [2, 3, 1]]
    rows = [{"nums": nums, "target": target} for target in range(40) for nums in orders]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = CountdownFiles(TaskRequest("countdown-chat", 0, str(path)), "chat")
    trained = {task.train(i).fields["target"] for i in range(len(rows) - task.num_held_out)}
    held_out = {task.held_out(i).fields["target"] for i in range(task.num_held_out)}
    assert trained | held_out == set(range(40)) and not trained & held_out


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ([1, 2], "must be an object like"),
        ({"nums": [1, 2]}, "has no target"),
        ({"numbers": [1, 2], "target": 3}, "has no nums"),
        ({"nums": "1 2", "target": 3}, "nums must be a list of 2 to 16 numbers, got str '1 2'"),
        ({"nums": [1], "target": 3}, "nums must be a list"),
        ({"nums": [1, 2.5], "target": 3}, "whole numbers from 0 to 999999999, got .*2.5"),
        ({"nums": [1, True], "target": 3}, "whole numbers .*True"),
        ({"nums": [1, -2], "target": 3}, "whole numbers .*-2"),
        ({"nums": [1, 2], "target": None}, "whole numbers .*None"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, record: object, words: str) -> None:
    path = write(tmp_path / "a.jsonl", {"nums": [1, 2], "target": 3}, record)
    with pytest.raises(ValueError, match=f"^--data .*a.jsonl, line 2: .*{words}") as error:
        CountdownFiles(TaskRequest("countdown", 0, str(path)))
    assert "\n" not in str(error.value)


# --- runs -----------------------------------------------------------------------------------------


def run(folder: Path, **changes: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train, and return the metrics and the evaluations."""
    Trainer(Config.of(**{**changes, "out_dir": str(folder)}), quiet=True).fit()
    logs = [(folder / name).read_text().splitlines() for name in ("metrics.jsonl", "eval.jsonl")]
    metrics, evaluations = ([json.loads(line) for line in log] for log in logs)
    return metrics, evaluations


@pytest.mark.parametrize("loss", ["grpo", "nll"])
def test_a_run_reports_the_share_of_solved_problems(tmp_path: Path, loss: str) -> None:
    changes = {**TINY, "reward_weights": "", "max_steps": 1, "loss": loss, "difficulty": "2x12"}
    metrics, evaluations = run(tmp_path / "run", task="countdown", **changes)
    assert [*evaluations[0]][2:4] == ["solved_sampled", "solved"]
    assert {"format", "format_sampled", "solved/2 numbers up to 12"} <= evaluations[0].keys()
    assert loss == "nll" or {"rewards/solved/mean", "rewards/format/mean"} <= metrics[0].keys()


def test_the_shipped_model_calculates_and_knows_a_hit(tmp_path: Path) -> None:
    """It is small, starts at once, and solves some problems, so that there is something to pay."""
    assert Path(shipped_model("countdown")).stat().st_size < 4_000_000
    changes = {"max_steps": 1, "eval_every": 0, "eval_size": 64, "prompts_per_step": 2}
    _, evaluations = run(tmp_path / "run", task="countdown", **changes, group_size=2)
    assert evaluations[0]["format_sampled"] > 0.6
    assert 0.1 < evaluations[0]["solved_sampled"] < 0.6


@pytest.mark.slow
def test_a_run_learns_to_solve_more(tmp_path: Path) -> None:
    _, evaluations = run(
        tmp_path / "run", task="countdown", max_steps=28, eval_every=0, eval_size=192
    )
    assert evaluations[-1]["solved_sampled"] > evaluations[0]["solved_sampled"] + 0.05
