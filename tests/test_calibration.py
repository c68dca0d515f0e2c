"""Stated confidences: the form, what it is paid, and questions with known chances."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest

from examples.calibration import HALVES, REQUEST, Calibration, parse

from .tiny import ask

CHAT = "<think>2 < 3</think> <answer>8</answer>\n<analysis>sure</analysis> "
CHAT += "<confidence>{}</confidence>"
NUMBERS = {"0.8": 0.8, "1": 1, "1.0": 1, "0.": 0, ".25": 0.25, " 0.5\n": 0.5, "0.\x1f": 0}
NO_NUMBERS = ["", ".", "1.1", "-0.1", "+0.5", "5e-1", "nan", "inf", "80%", "0,8"]
NO_NUMBERS += ["0.5.5", "0x1", "1_0", "½", "٠", "high"]


def test_a_confidence_is_a_plain_number_from_0_to_1() -> None:
    for number in (*NUMBERS, *NO_NUMBERS):
        expected = ("8", NUMBERS[number]) if number in NUMBERS else None
        assert parse(CHAT.format(number), chat=True) == expected, number
        assert parse(f"8<confidence>{number}</confidence>", chat=False) == expected, number


GOOD = CHAT.format(0.5)
BAD = [
    "8",
    f"{GOOD}.",
    GOOD + GOOD,
    GOOD.replace("</think>", ""),
    GOOD.replace("<analysis>sure</analysis>", ""),
    GOOD.replace("</answer>", "</answer> and <answer>9</answer>"),
    GOOD.replace("sure", "<answer>9</answer>"),
    CHAT.format("0.5</confidence><confidence>0.9"),
]


def test_the_chat_form_has_each_tag_once_and_in_order() -> None:
    begun_by_the_template = GOOD.removeprefix("<think>")
    for text in (begun_by_the_template, f" {GOOD}\n ", GOOD.replace("8", " 8\n")):
        assert parse(text, chat=True) == ("8", 0.5), text
    for text in BAD:
        assert parse(text, chat=True) is None, text


def test_in_the_plain_form_the_answer_stands_before_the_tag() -> None:
    form = "<confidence>0.5</confidence>"
    for answer in ("8", " M: a1a8 B: a1a8", "<answer>1 < 2</answer>", ""):
        assert parse(f"{answer} {form}\n", chat=False) == (answer, 0.5)
    for text in (f"8{form[:-1]}", f"8{form}8", f"8{form}{form}", "8 0.5"):
        assert parse(text, chat=False) is None, text


@pytest.mark.parametrize("piece", ["<", "<think>", "</think>", " ", "<answer>", "<confidence>"])
def test_a_long_completion_is_read_in_no_time(piece: str) -> None:
    long = piece * 20_000
    for text in (long, CHAT.format(f"{long}x"), f"{long}{GOOD}<confidence>"):
        assert parse(text, chat=True) is None
        assert parse(text, chat=False) is None


def capitals(**changes: Any) -> Calibration:
    """A task on chats and plain prompts whose held-out ones are known."""
    held_out = [
        {"messages": ask("France?", system="Be brief."), "answer": "Paris"},
        {"prompt": "39+83=", "answer": "122"},
    ]
    rows = [{"prompt": f"{i}=", "answer": f"{i}"} for i in range(20)]
    return Calibration(0, [rows], [held_out], **changes)


def answered(answer: str, confidence: float) -> str:
    return CHAT.format(confidence).replace("8", answer, 1)


def test_answers_are_paid_by_the_published_formula() -> None:
    task = capitals()
    example = task.held_out(0)
    for answer, confidence, correct in (("Paris", 0.25, 1), ("Rome", 0.25, 0)):
        brier = 1 - (correct - confidence) ** 2
        scores = task.score(example, answered(answer, confidence))
        assert scores == {"format": 1, "correct": correct, "brier": brier, "confidence": confidence}
        total = sum(weight * scores[name] for name, weight in task.reward_weights.items())
        assert total == pytest.approx(0.5 + 0.5 * correct + 0.5 * brier)
    assert task.score(example, "Paris") == dict.fromkeys(task.reward_weights, 0)


def test_messages_ask_for_the_form_and_plain_prompts_stay() -> None:
    chat, plain = map(capitals().held_out, range(2))
    assert [*chat.messages] == ask(f"France?{REQUEST}", system="Be brief.")
    assert not plain.messages
    assert plain.prompt == "39+83="
    (asked,) = capitals(chat=True).held_out(1).messages  # as with --system
    assert asked["content"] == f"39+83={REQUEST}"


@pytest.mark.parametrize(("chat", "number"), [(False, 0), (False, 1), (True, 1)])
def test_answers_to_learn_are_correct(chat: bool, number: int) -> None:
    task = capitals(chat=chat)
    example = task.held_out(number)
    assert task.score(example, example.answer)["correct"] == 1


def test_other_judges_say_what_is_right() -> None:
    judged = capitals(judge="qa")
    assert judged.score(judged.held_out(0), answered("the paris!", 1))["correct"] == 1
    sums = [{"question": "30+42?", "answer": "It is\n#### 72"}]
    maths = Calibration(0, (), [sums], judge="math")
    for answer, right in (("#### 72 clips", 1), ("\\boxed{72}", 1), ("73", 0)):
        scores = maths.score(maths.held_out(0), f"{answer}<confidence>0.5</confidence>")
        assert scores["correct"] == right


def test_summaries_are_those_of_the_completions_whose_form_matches() -> None:
    parts = {
        "format": np.array([1, 1, 0, 0]),
        "confidence": np.array([0.75, 0.25, 0, 0]),
        "correct": np.array([1, 0, 0, 0]),
    }
    expected = {"brier_score": 0.0625, "ece": 0.25, "auroc": 1, "mean_confidence": 0.5}
    assert Calibration(0).summaries(parts) == pytest.approx(expected)
    assert not Calibration(0).summaries({name: values[2:] for name, values in parts.items()})


def test_each_question_allows_as_many_digits_as_it_says_and_hides_one_of_them() -> None:
    task = Calibration(0)
    named = {**HALVES, "any digit": "0123456789"}
    answers = defaultdict(Counter)
    for number in range(2000):
        example = task.train(number)
        possible = example.fields["possible"]
        answer = example.fields["true_answer"]
        shown, hint = example.prompt.removesuffix(": ").split(", ")
        assert shown.count("_") == 1
        assert answer in possible
        assert example.kind == f"1 of {len(possible)}"
        assert possible == named.get(hint, hint.replace(" or ", ""))
        answers[hint][answer] += 1
    for hint in ("even", "above 4", "any digit"):  # each digit equally often, within 5 deviations
        assert len(answers[hint]) == len(named[hint])
        mean = answers[hint].total() / len(named[hint])
        for count in answers[hint].values():
            assert abs(count - mean) < 5 * np.sqrt(mean)
