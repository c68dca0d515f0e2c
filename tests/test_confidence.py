"""--confidence: the form of a completion, what it is paid, and questions with known chances."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minigrpo.rewards import RewardScorer
from minigrpo.runtime.flags import ConfigError
from minigrpo.tasks.chess_env import ChessEnv
from minigrpo.tasks.confidence import REQUEST, WithConfidence, parse, with_confidence, write
from minigrpo.tasks.hidden_digit import DIGITS, HiddenDigit
from minigrpo.types import Example

CHAT = (
    "<think>2 < 3</think> <answer>8</answer>\n<analysis>sure</analysis> <confidence>{}</confidence>"
)


# --- the form -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "confidence"),
    [("0.8", 0.8), ("1", 1), ("1.0", 1), ("0", 0), ("0.", 0), (".25", 0.25), (" 0.5\n", 0.5)]
    + [("0.\x1f", 0)]  # white space for a pattern, but not for `float`
    + [(text, None) for text in ("", ".", "1.1", "2", "-0.1", "+0.5", "1e0", "5e-1", "nan")]
    + [(text, None) for text in ("inf", "80%", "0,8", "0.5.5", "0x1", "1_0", "½", "٠", "high")],
)
def test_a_confidence_is_a_plain_number_from_0_to_1(number: str, confidence: float | None) -> None:
    for chat, text in ((True, CHAT), (False, "8<confidence>{}</confidence>")):
        found = parse(text.format(number), chat=chat)
        assert (found and found.confidence) == confidence
        assert found is None or found.answer == "8"


@pytest.mark.parametrize(
    "text",
    [
        CHAT.format(0.5).removeprefix("<think>"),  # the template wrote the tag
        f" {CHAT.format(0.5)}\n ",
        CHAT.format(0.5).replace("8", " <b>8</b>\n"),
        write("8", 0.5, chat=True),
    ],
)
def test_the_chat_form_matches(text: str) -> None:
    found = parse(text, chat=True)
    assert found is not None and found.answer.strip("</b>") == "8" and found.confidence == 0.5


@pytest.mark.parametrize(
    "text",
    [
        "8",
        "",
        f"{CHAT.format(0.5)}.",
        f"{CHAT.format(0.5)}{CHAT.format(0.6)}",
        CHAT.format(0.5).replace("</think>", ""),
        CHAT.format(0.5).replace("<analysis>sure</analysis>", ""),
        CHAT.format(0.5).replace("<answer>8</answer>", ""),
        CHAT.format(0.5).replace("</answer>", "</answer> and <answer>9</answer>"),
        CHAT.format(0.5).replace("sure", "<answer>9</answer>"),
        CHAT.format(0.5).replace("</answer>", "</answer> or"),
        CHAT.format("0.5</confidence><confidence>0.9"),
        "8<confidence>0.5</confidence>",
    ],
)
def test_the_chat_form_does_not_match(text: str) -> None:
    assert parse(text, chat=True) is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("8<confidence>0.5</confidence>", "8"),
        (" M: a1a8 B: a1a8 <confidence>0.5</confidence>\n", " M: a1a8 B: a1a8"),
        ("<answer>1 < 2</answer><confidence>0.5</confidence>", "<answer>1 < 2</answer>"),
        ("<confidence>0.5</confidence>", ""),
        ("8<confidence>0.5", None),
        ("8<confidence>0.5</confidence>8", None),
        ("8<confidence>0.5</confidence><confidence>0.5</confidence>", None),
        ("8 0.5", None),
    ],
)
def test_in_the_plain_form_the_answer_stands_before_the_tag(text: str, answer: str | None) -> None:
    found = parse(text, chat=False)
    assert (found.answer if found else None) == answer


@pytest.mark.parametrize(
    "piece", ["<", "<think>", "</think>", " ", "<answer>", "1", "<confidence>"]
)
def test_a_long_completion_is_read_in_no_time(piece: str) -> None:
    long = piece * 20_000
    for text in (long, CHAT.format(f"{long}x"), f"{long}{CHAT.format(0.5)}<confidence>"):
        assert parse(text, chat=True) is parse(text, chat=False) is None


# --- the reward -----------------------------------------------------------------------------------


class Capitals:
    """A task that names its success, and scores one text at a time."""

    parts: Mapping[str, float] = {"right": 1.0, "format": 0.3, "length": 0.1}
    success = "right"

    def train(self, number: int) -> Example:
        asked = {"role": "user", "content": "France?"}
        messages = ({"role": "system", "content": "Be brief."}, asked)
        return Example("France?", "Paris", number, messages=messages)

    held_out = train

    def score(self, example: Example, text: str) -> dict[str, float]:
        right = {example.answer.lower(): 1.0, "pari": 0.5}.get(text.lower(), 0.0)
        return {"right": right, "format": float(text.istitle()), "length": np.nan}


def make(task: Any = None, **changes: Any) -> WithConfidence:
    options = {"seed": 0, "chat": False, "supervised": False, **changes}
    return with_confidence(task or HiddenDigit(0), **options)


def test_a_right_and_a_wrong_answer_are_paid_by_the_formula() -> None:
    task, example = make(Capitals()), make(Capitals()).train(0)
    own = {"length": pytest.approx(np.nan, nan_ok=True)}
    assert task.score(example, CHAT.format(0.8).replace("8", "paris", 1)) == {
        "format": 1,
        "correct": 1,
        "brier": pytest.approx(1 - 0.2**2),
        "confidence": 0.8,
        "answer_format": 0,
        **own,
    }
    wrong = task.score(example, CHAT.format(0.8).replace("8", "Rome", 1))
    assert wrong["correct"] == 0 and wrong["brier"] == pytest.approx(1 - 0.8**2)
    assert wrong["answer_format"] == 1
    almost = task.score(example, CHAT.format(0.8).replace("8", "Pari", 1))
    assert almost["correct"] == 0 and almost["brier"] == pytest.approx(1 - 0.8**2)
    malformed = task.score(example, "Paris")
    assert malformed == {**dict.fromkeys(task.parts, 0), **own}  # which does not concern it


def test_the_total_is_the_published_reward() -> None:
    task = make(Capitals())
    texts = [CHAT.format(q).replace("8", answer, 1) for answer, q in (("Paris", 1), ("Rome", 0.5))]
    scorer = RewardScorer(task)  # type: ignore[arg-type]
    table = scorer.score([task.train(0)], [[*texts, "Paris"]])
    assert table.total[0] == pytest.approx([1.5, 0.5 + 0.5 * 0.75, 0])
    assert not any(table.failures.values())
    only = RewardScorer(task, weights={"format": 0.5, "correct": 0.5})  # type: ignore[arg-type]
    assert only.score([task.train(0)], [texts]).total[0] == pytest.approx([1, 0.5])


def test_a_task_without_a_success_is_right_where_its_answer_is_written() -> None:
    task = make(ChessEnv(0))
    example, other = task.train(0), task.train(1)
    assert example.answer.endswith("<confidence>1.0</confidence>")
    scores = task.score(example, example.answer)
    names = ("format", "correct", "brier", "exact_fen", "answer_format")
    assert {name: scores[name] for name in names} == dict.fromkeys(names, 1)
    assert task.score(example, other.answer)["correct"] == 0


def test_a_batch_is_scored_as_its_texts_are_one_by_one() -> None:
    task: Any = make(HiddenDigit(3))
    examples = [task.train(i) for i in range(40)]
    ends = itertools.cycle(["", "<confidence>0.3</confidence>", "<confidence>7</confidence>"])
    texts = [f"{i % 10}{end}" for i, end in zip(range(40), ends, strict=False)]
    batch = task.score_batch(examples, texts)
    for i, (example, text) in enumerate(zip(examples, texts, strict=True)):
        assert task.score(example, text) == {name: x[i] for name, x in batch.items()}
    assert set(batch["format"]) == {0, 1} == set(batch["possible"])


def test_only_a_batch_that_the_task_scores_without_a_time_limit_is_one_here() -> None:
    assert hasattr(make(HiddenDigit(0)), "score_batch")
    assert not hasattr(make(Capitals()), "score_batch")


def test_the_request_ends_the_last_message_of_the_user_and_plain_prompts_stay() -> None:
    system, user = make(Capitals()).train(0).messages
    assert system["content"] == "Be brief." and user["content"] == f"France?{REQUEST}"
    assert make(HiddenDigit(0)).train(0).prompt == HiddenDigit(0).train(0).prompt
    (asked,) = make(HiddenDigit(0), chat=True).train(0).messages  # as with --system
    assert asked == {"role": "user", "content": HiddenDigit(0).train(0).prompt + REQUEST}
    assert make(HiddenDigit(0), chat=True).train(0).answer.startswith("<think></think> <answer>")


def test_true_answers_of_a_warm_start_state_random_confidences() -> None:
    task = make(HiddenDigit(0), supervised=True)
    stated = [parse(task.train(i).answer, chat=False) for i in range(400)]
    answers = [one.answer for one in stated if one]
    assert answers == [HiddenDigit(0).train(i).answer for i in range(400)]
    counts = {q: [one.confidence for one in stated if one].count(q) for q in np.arange(11) / 10}
    assert sum(counts.values()) == 400 and min(counts.values()) > 15
    assert task.train(7) == make(HiddenDigit(0), supervised=True).train(7)


def test_a_task_that_pays_tokens_is_refused() -> None:
    class Tokens(Capitals):
        score_tokens = None

    with pytest.raises(ConfigError, match="--confidence needs a task whose answers are right or"):
        make(Tokens())


# --- what the Brier part is for -------------------------------------------------------------------


@given(st.integers(0, 100), st.integers(0, 100))
def test_the_true_probability_has_the_highest_expected_brier_part(p: int, q: int) -> None:
    """Over right and wrong answers with chances p and 1 - p; the gap is (p - q)^2."""
    task, example = make(Capitals()), make(Capitals()).train(0)

    def expected(q: float) -> float:
        paid = (
            task.score(example, write(answer, 0, chat=True).replace("0.0", str(q)))["brier"]
            for answer in ("Paris", "Rome")
        )
        right, wrong = paid
        return p / 100 * right + (1 - p / 100) * wrong

    assert expected(p / 100) - expected(q / 100) == pytest.approx((p - q) ** 2 / 1e4, abs=1e-12)


# --- evaluation -----------------------------------------------------------------------------------


def columns(task: WithConfidence, rows: Sequence[tuple[int, float, float]]) -> dict[str, Any]:
    """Parts of n completions, from their format, confidence and correct."""
    table = np.array(rows, dtype=float).T
    parts = dict(zip(("format", "confidence", "correct"), table, strict=True))
    return {**{name: np.zeros(len(rows)) for name in task.parts}, **parts}


def test_summaries_are_those_of_the_completions_whose_form_matches() -> None:
    task = make(ChessEnv(0))
    rows = [(1, 0.75, 1.0), (1, 0.25, 0.0), (0, 0.0, 0.0), (0, 0.0, 0.0), (1, 0.5, np.nan)]
    assert task.summaries(columns(task, rows)) == {
        "brier_score": pytest.approx(0.0625),
        "ece": pytest.approx(0.25),
        "ece_by_chance": pytest.approx((2 / np.pi * 0.1875) ** 0.5),
        "auroc": 1,
        "mean_confidence": pytest.approx(0.5),
    }
    assert "auroc" not in task.summaries(columns(task, rows[:1]))
    assert task.summaries(columns(task, rows[2:])) == {}


def test_a_model_that_knows_the_chances_reaches_what_is_called_best() -> None:
    task = make(HiddenDigit(1))
    examples = [task.held_out(i) for i in range(1000)]
    texts = [
        write(example.fields["possible"][0], 1 / len(example.fields["possible"]), chat=False)
        for example in examples
    ]
    scorer = RewardScorer(task)  # type: ignore[arg-type]
    parts = scorer.score(examples, [[text] for text in texts]).parts
    found = task.summaries({name: x[:, 0] for name, x in parts.items()})
    assert found["best_accuracy"] == pytest.approx((1 + 1 / 2 + 1 / 5 + 1 / 10) / 4)
    assert found["best_brier"] == pytest.approx((1 / 4 + 4 / 25 + 9 / 100) / 4)
    assert parts["correct"].mean() == pytest.approx(found["best_accuracy"], abs=0.04)
    assert found["brier_score"] == pytest.approx(found["best_brier"], abs=0.015)
    assert found["best_ece"] == 0 and found["ece"] < 0.05


# --- questions whose chances are known ------------------------------------------------------------


def test_each_question_allows_as_many_digits_as_it_says_and_hides_one_of_them() -> None:
    task, seen = HiddenDigit(0), dict[str, list[str]]()
    for number in range(3000):
        example = task.train(number)
        possible = example.fields["possible"]
        assert example.kind == f"1 of {len(possible)}" and example.answer in possible
        assert example.prompt.count("_") == 1 and example.prompt.endswith(": ")
        hint = example.prompt[:-2].partition(", ")[2]
        kept = {"even": "02468", "odd": "13579", "below 5": "01234", "above 4": "56789"}
        kept["any digit"] = DIGITS
        assert set(possible) == set(kept.get(hint, hint.replace(" or ", "")))
        seen.setdefault(hint, []).append(example.answer)
    for hint in ("even", "above 4", "any digit"):  # each digit equally often, within 5 deviations
        counts = np.unique(seen[hint], return_counts=True)[1]
        n, size = len(seen[hint]), len(counts)
        assert size == (10 if hint == "any digit" else 5)
        assert abs(counts - n / size).max() < 5 * np.sqrt(n / size)


def test_training_never_sees_a_held_out_prompt() -> None:
    task = HiddenDigit(0)
    trained = {task.train(number).prompt for number in range(1000)}
    assert not trained & {task.held_out(number).prompt for number in range(300)}
    assert task.train(5) == HiddenDigit(0).train(5) != HiddenDigit(1).train(5)
