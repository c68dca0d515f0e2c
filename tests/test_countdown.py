"""Countdown: a verifier that cannot be tricked, problems, and texts for supervised fine-tuning."""

import itertools
import re
from contextlib import suppress
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from examples.countdown import LARGEST, Problems
from examples.countdown_rows import Countdown, parse_problem
from examples.countdown_sft import chat_text, random_search, short_text
from minigrpo.config import Config
from minigrpo.evaluate import grade, held_out_examples
from minigrpo.rng import stream
from minigrpo.run.console import Console
from minigrpo.tasks.countdown import evaluate, given_answer, result, solves
from minigrpo.tools.models import open_with_task
from minigrpo.turns.tools import calls_of
from minigrpo.types import Completion
from minigrpo.userfiles import load_file

from .tiny import ROOT, refused

TOOL = load_file(str(ROOT / "examples/countdown_tool.py"))
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
    with suppress(Exception):  # whatever it is, the verifier takes it for no answer
        return evaluate(text)
    return None


@settings(max_examples=160)
@given(EXPRESSIONS | st.text("0123456789+-*/() ", max_size=12))
@example("1/49*49")
@example("1/(2-2)")
@example("3**2")
@example("3(4)")
def test_an_expression_is_worth_what_python_says_in_fractions(text: str) -> None:
    """Without what the grammar has not: **, //, unary plus, calls and leading zeros."""
    other = re.search(r"\*\s*\*|/\s*/|(?:^|[-+*/(])\s*\+|(?<![0-9])0+[1-9]", text)
    value = None if other else python_value(text.strip())
    assert own_value(text) == value
    assert TOOL.calculate(text) == ("error" if value is None else str(value))


HOSTILE = [
    *("", "\x00", "\ud800", "4+٣", "1_0", "1e1", "0x10", "3.0", "9**9**9**9", "=", ","),
    *("__import__('os').abort()", "[3,4,5]", "lambda:1", "3 if 4 else 5", "1/(1-1)"),
    *("(" * 100_000 + "1" + ")" * 100_000, "(" * 199 + "1" + ")" * 199, "-" * 390 + "1"),
    *("9" * 1_000_000, "1/" * 150 + "3", "*".join(["999999999"] * 39)),
    *("<answer>" * 100_000, "</answer>" * 100_000 + "<answer>", "\n" * 1_000_000),
    *("1," * 199 + "1", "1=" * 199 + "1", "\\times" * 60),
]


def test_hostile_text_is_no_answer_and_costs_nothing() -> None:
    for text in HOSTILE:
        assert TOOL.calculate(text) == "error" or own_value(text) is not None
        for wrapped in (text, f"<answer>{text}</answer>"):
            assert result(given_answer(wrapped), [3, 4, 5]) != 35, text[:40]


ANSWERS = {  # what lines reach with 3, 4 and 5
    35: [
        *("(4+3)*5", "5 * (3 + 4) = 35", "(4+3)*5=7*5=35", "4+3=7,7*5=35", "4+3=7, 5*7"),
        # as people and chat models write it
        *("4+3=7, 7*5=35.", "$(4+3) \\times 5 = 35$", "$(4+3)*5$.", "(4 + 3) × 5", "(4\n+3)\t*5"),
    ],
    5: ["\\( 5 \\div (4 - 3) \\)"],
    6: ["-3+4+5", "3-5=-2,4-(-2)=6"],
    Fraction(5, 7): ["5/(4+3)"],
    -5: ["3-4=-1,-1*5=-5", "3-4=-1,5*-1"],
    4: ["3-4=-1,5-1=4"],  # signs are free: 5 - (-(3 - 4))
    None: [
        *("3-4=1,5*1", "(4+3)*5=36", "4+3=8,8*5=40"),  # not true
        *("35", "35=(4+3)*5", "45-3"),  # not with the numbers
        *("4+3", "4+3=7", "4+3=7,5*5=25", "4+3=7,4*5=20", "4+3+5+5"),  # left over, or used twice
        *("4+3=7,7*5=35,", "4+3=7 7*5=35", "(4+3)*5.."),
    ],
}


def test_an_answer_uses_each_number_once_and_its_equations_hold() -> None:
    for value, answers in ANSWERS.items():
        for answer in answers:
            assert result(answer, [3, 4, 5]) == value, answer
            assert given_answer(f"<answer>{answer}</answer>") == answer
            assert value is None or solves(f"<answer>{answer}</answer>", [3, 4, 5], value)


def test_numbers_count_as_often_as_they_are_given() -> None:
    assert result("6*6", [6, 6]) == 36
    assert result("6*6", [6, 6, 6]) is None
    assert result("6*6", [6]) is None
    assert result("6+6=12,12+6=18,18+12=30", [6, 6, 6, 12]) == 30  # 12 is given, and a result
    assert result("6+6=12,12+12=24", [6, 6]) is None
    assert result("2-4=-2,-2+2=0,0+7", [2, 4, 2, 7]) == 7  # -2 and 2 are both there


def test_the_last_tags_count_else_the_last_line() -> None:
    texts = {
        "<think>12*3?</think>\n<answer>(4+3)*5</answer>": "(4+3)*5",
        "4*3=12,12+5=17\n4+3=7,7*5=35\n": "4+3=7,7*5=35",
        "4*5=20,20-3=17<4+3=7,7*5=35": "4+3=7,7*5=35",
        "4*5=20,20-3=17<": "",
        "(4+3)*5\n<answer>": "",  # cut off before the answer
        "</answer>(4+3)*5<answer>": "",
        "<answer>1</answer> no, <answer>\n2\n</answer> and so on": "\n2\n",
        "<answer>1</answer> <answer>2": "1",
    }
    assert {text: given_answer(text) for text in texts} == texts


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 100), min_size=2, max_size=6))
def test_random_attempts_state_true_values(seed: int, numbers: list[int]) -> None:
    attempts = random_search(stream(seed, "search"), numbers, 7)
    attempt = attempts[-1]
    assert result(attempt.expression, numbers) == attempt.value
    assert attempt.value >= 0 if 0 in numbers else 0 < attempt.value <= LARGEST
    assert all(result(x.steps, numbers) == x.value for x in attempts)
    assert sorted(re.split("[<>]", short_text(attempts, 7))) == sorted({x.steps for x in attempts})
    assert given_answer(chat_text(attempts, 7)) == attempt.expression


ORDERS = [[1, 2, 30], [30, 1, 2], [2, 30, 1]]
PROBLEMS = [{"nums": nums, "target": target} for target in range(20, 60) for nums in ORDERS]


def test_a_problem_is_in_one_split_in_whatever_order_its_numbers_stand() -> None:
    task = Countdown(0, [PROBLEMS])
    trained = {task.train(i).fields["target"] for i in range(120 - 3 * task.num_held_out)}
    held_out = {task.held_out(i).fields["target"] for i in range(task.num_held_out)}
    assert trained | held_out == {*range(20, 60)}
    assert not trained & held_out


def test_an_answer_in_a_chat_is_scored_by_value_and_form() -> None:
    task = Countdown(0, [PROBLEMS])
    example = task.train(0)
    (message,) = example.messages
    assert "30" in message["content"]
    is_33 = example.fields["target"] == 33
    for text, solved, form in (("1+2+30", is_33, 1), ("1+2", 0, 0), ("33", 0, 0)):
        assert task.score(example, f"<answer>{text}</answer>") == {"solved": solved, "format": form}


NO_PROBLEMS = [
    *({"nums": nums, "target": 3} for nums in ("1 2", [1], [1, 2.5], [1, -2], None)),
    {"nums": [1, 2], "target": "3"},
    {"nums": [1, 2]},
]


@pytest.mark.parametrize("line", NO_PROBLEMS, ids=str)
def test_what_is_no_problem_is_refused(line: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        parse_problem(line)


def test_other_difficulties_and_forms_are_refused() -> None:
    for difficulty in ("", "3", "3x", "3x5", "3x12,"):
        with pytest.raises(ValueError):
            Problems(0, difficulty=difficulty)
    refused(Problems, 0, form="other")


def said(text: Completion, role: str) -> list[str]:
    return [message["content"] for message in text.messages if message["role"] == role]


def test_the_model_that_ships_calls_the_calculator() -> None:
    sampler, scorer = open_with_task(Config.from_toml("countdown-tool"), Console())
    done = grade(sampler, scorer, held_out_examples(scorer.task, 8), 4)
    answered = 0
    for text in itertools.chain(*done.texts):
        calls = [call for turn in said(text, "assistant") for call in calls_of(turn)]
        asked = [arguments for _, arguments in calls if "expression" in arguments]
        if len(asked) == len(calls) and not text.cut:
            answers = [TOOL.calculate(**arguments) for arguments in asked]
            assert said(text, "tool") == answers
            answered += len(answers)
    assert answered > 16
