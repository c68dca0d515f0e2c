"""Stated confidences: the form, what it is paid, and questions with known chances."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.calibration import HALVES, REQUEST, Calibration, parse

from .tiny import write_jsonl

CHAT = "<think>2 < 3</think> <answer>8</answer>\n<analysis>sure</analysis> "
CHAT += "<confidence>{}</confidence>"


def test_a_confidence_is_a_plain_number_from_0_to_1() -> None:
    good = {"0.8": 0.8, "1": 1, "1.0": 1, "0": 0, "0.": 0, ".25": 0.25, " 0.5\n": 0.5, "0.\x1f": 0}
    bad = ["", ".", "1.1", "2", "-0.1", "+0.5", "1e0", "5e-1", "nan", "inf", "80%", "0,8"]
    bad += ["0.5.5", "0x1", "1_0", "½", "٠", "high"]
    for number, confidence in (good | dict.fromkeys(bad)).items():
        for chat, text in ((True, CHAT), (False, "8<confidence>{}</confidence>")):
            expected = None if confidence is None else ("8", confidence)
            assert parse(text.format(number), chat=chat) == expected, number


def test_the_chat_form_has_each_tag_once_and_in_order() -> None:
    good = CHAT.format(0.5)
    for text in (
        good.removeprefix("<think>"),  # the template wrote the tag
        f" {good}\n ",
        good.replace("8", " 8\n"),
    ):
        assert parse(text, chat=True) == ("8", 0.5), text
    for text in (
        *("8", "", f"{good}.", f"{good}{CHAT.format(0.6)}", good.replace("</think>", "")),
        good.replace("<analysis>sure</analysis>", ""),
        good.replace("<answer>8</answer>", ""),
        good.replace("</answer>", "</answer> and <answer>9</answer>"),
        good.replace("sure", "<answer>9</answer>"),
        good.replace("</answer>", "</answer> or"),
        CHAT.format("0.5</confidence><confidence>0.9"),
        "8<confidence>0.5</confidence>",
    ):
        assert parse(text, chat=True) is None, text


def test_in_the_plain_form_the_answer_stands_before_the_tag() -> None:
    form = "<confidence>0.5</confidence>"
    for answer in ("8", " M: a1a8 B: a1a8", "<answer>1 < 2</answer>", ""):
        assert parse(f"{answer} {form}\n", chat=False) == (answer, 0.5)
    for text in (f"8{form[:-1]}", f"8{form}8", f"8{form}{form}", "8 0.5"):
        assert parse(text, chat=False) is None, text


def test_a_long_completion_is_read_in_no_time() -> None:
    for piece in ("<", "<think>", "</think>", " ", "<answer>", "1", "<confidence>"):
        long = piece * 20_000
        for text in (long, CHAT.format(f"{long}x"), f"{long}{CHAT.format(0.5)}<confidence>"):
            assert parse(text, chat=True) is parse(text, chat=False) is None


def capitals(folder: Path, **changes: Any) -> Calibration:
    """A task on chats and plain prompts whose held-out ones are known."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "France?"}]
    held_out = [{"messages": chat, "answer": "Paris"}, {"prompt": "39+83=", "answer": "122"}]
    test = write_jsonl(folder / "eval.jsonl", held_out)
    rows = ({"prompt": f"{i}=", "answer": f"{i}"} for i in range(20))
    return Calibration(0, [write_jsonl(folder / "train.jsonl", rows)], [test], **changes)


def answered(answer: str, confidence: float) -> str:
    return CHAT.format(confidence).replace("8", answer, 1)


def test_answers_are_paid_by_the_published_formula(tmp_path: Path) -> None:
    task = capitals(tmp_path)
    example = task.held_out(0)
    for answer, confidence, correct in (("Paris", 0.25, 1), ("Rome", 0.25, 0), ("Rome", 0.5, 0)):
        brier = 1 - (correct - confidence) ** 2
        scores = task.score(example, answered(answer, confidence))
        assert scores == {"format": 1, "correct": correct, "brier": brier, "confidence": confidence}
        total = sum(weight * scores[name] for name, weight in task.parts.items())
        assert total == pytest.approx(0.5 + 0.5 * correct + 0.5 * brier)
    assert task.score(example, "Paris") == dict.fromkeys(task.parts, 0)
    assert task.score(task.held_out(1), "122<confidence>1</confidence>")["correct"] == 1


def test_messages_ask_for_the_form_and_plain_prompts_stay(tmp_path: Path) -> None:
    task, as_chat = capitals(tmp_path), capitals(tmp_path, chat=True)
    system, user = task.held_out(0).messages
    assert system["content"] == "Be brief." and user["content"] == f"France?{REQUEST}"
    assert task.held_out(0).answer.startswith("<think></think> <answer>Paris</answer>")
    for example in (task.held_out(0), task.held_out(1), as_chat.held_out(1)):  # SFT's answers
        assert task.score(example, example.answer)["correct"] == 1
    assert task.held_out(1).prompt == "39+83=" and not task.held_out(1).messages
    (asked,) = as_chat.held_out(1).messages  # as with --system
    assert asked == {"role": "user", "content": f"39+83={REQUEST}"}
    assert {task.known(i).prompt for i in range(task.num_known)} >= {"France?"}
    assert task.questions is not None and task.num_held_out == 2


def test_other_judges_say_what_is_right(tmp_path: Path) -> None:
    judged = capitals(tmp_path, judge="qa")
    assert judged.score(judged.held_out(0), answered("the paris!", 1))["correct"] == 1
    sums = [{"question": "30+42?", "answer": "It is\n#### 72"}]
    maths = Calibration(0, (), [sums], judge="math")
    for answer, right in (("#### 72 clips", 1), ("72", 1), ("\\boxed{72}", 1), ("73", 0)):
        scores = maths.score(maths.held_out(0), f"{answer}<confidence>0.5</confidence>")
        assert scores["correct"] == right


def test_summaries_are_those_of_the_completions_whose_form_matches() -> None:
    rows = np.array([(1, 0.75, 1.0), (1, 0.25, 0.0), (0, 0.0, 0.0), (0, 0.0, 0.0)]).T
    parts = dict(zip(("format", "confidence", "correct"), rows, strict=True))
    expected = {"brier_score": 0.0625, "ece": 0.25, "auroc": 1, "mean_confidence": 0.5}
    assert Calibration(0).summaries(parts) == pytest.approx(expected)
    assert not Calibration(0).summaries({name: values[2:] for name, values in parts.items()})


def test_each_question_allows_as_many_digits_as_it_says_and_hides_one_of_them() -> None:
    task = Calibration(0)
    answers = {}
    for number in range(2000):
        example = task.train(number)
        possible = example.fields["possible"]
        answer = example.fields["true_answer"]
        shown, hint = example.prompt.removesuffix(": ").split(", ")
        assert shown.count("_") == 1 and answer in possible
        assert example.kind == f"1 of {len(possible)}"
        named = {**HALVES, "any digit": "0123456789"}
        assert possible == named.get(hint, hint.replace(" or ", ""))
        answers.setdefault(hint, []).append(answer)
    for hint in ("even", "above 4", "any digit"):  # each digit equally often, within 5 deviations
        counts = np.unique(answers[hint], return_counts=True)[1]
        assert len(counts) == (10 if hint == "any digit" else 5)
        assert abs(counts - counts.mean()).max() < 5 * np.sqrt(counts.mean())
