"""Question answering: lines of several published formats, and exact match as SQuAD defines it."""

import json
from pathlib import Path
from typing import Any

import pytest

from minigrpo.tasks.qa import answered, exact_match, normalized, parse_line
from minigrpo.tasks.registry import load_task
from minigrpo.types import Example


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Beatles!", "beatles"),
        ("an apple a day", "apple day"),
        ("Theodore", "theodore"),
        ("U.S.A.", "usa"),
        ("co-op", "coop"),
        (" yes\n", "yes"),
        ("A", "a"),
        ("The.", "the"),
        ("+", "+"),
        ("Émile", "émile"),
        ("", ""),
    ],
)
def test_case_punctuation_and_articles_do_not_matter(text: str, expected: str) -> None:
    assert normalized(text) == expected


def test_any_of_the_answers_matches_and_an_empty_text_none() -> None:
    assert exact_match("the Seine.", ["Rhine", "Seine"])
    assert not exact_match("Seine river", ["Seine"])
    assert not exact_match(" ", ["Seine"]) and not exact_match("", [""])


def test_the_answer_stands_between_the_last_tags_or_is_the_whole_text() -> None:
    assert answered("I think <answer>x</answer>, no: <answer>\ny\n</answer>.") == "\ny\n"
    assert answered("Paris") == "Paris"
    assert answered("<answer>a<answer>b</answer>") == "b"


HUB = {"title": ["Paris", "Seine"], "sentences": [["A city.", " Big."], ["A river."]]}
ORIGINAL = [["Paris", ["A city.", " Big."]], ["Seine", ["A river."]]]


@pytest.mark.parametrize("context", [HUB, ORIGINAL, "Paris: A city. Big.\n\nSeine: A river."])
def test_hotpotqa_lines_become_a_user_message(context: Any) -> None:
    line = {"question": "Where?", "answer": "Paris", "context": context, "level": "hard"}
    example = parse_line(json.dumps(line))
    (message,) = example.messages
    assert message["role"] == "user"
    assert message["content"].startswith("Paris: A city. Big.\n\nSeine: A river.\n\nWhere?\n\n")
    assert (example.prompt, example.answer) == ("Where?", "Paris")
    assert example.fields["level"] == "hard"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"question": "Where?"}, "answer is None"),
        ({"question": "", "answer": "x"}, "question is str ''"),
        ({"question": "Where?", "answer": ["x", 3]}, "answer is int '3'"),
        ({"question": "Where?", "answer": []}, "answer is []"),
        (
            {"question": "Where?", "answer": "x", "context": 3},
            "context must be a text, or HotpotQA",
        ),
        ({"question": "Where?", "answer": "x", "context": [["a"]]}, "context must be a text"),
        # what can be unpacked into two is not yet a title and its sentences
        *(
            ({"question": "Where?", "answer": "x", "context": context}, "context must be a text")
            for context in (
                [{"title": "Paris", "text": "A city."}],
                ["Hi", "No"],
                [["Paris", "A city."]],
                [["Paris", {"A city.": 1}]],
                [[1, ["A city."]]],
                {"title": "ab", "sentences": [["x"], ["y"]]},
            )
        ),
        ([], "must be an object like"),
    ],
)
def test_another_line_is_named(tmp_path: Path, line: Any, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="^--data .*bad.jsonl, line 1: ") as error:
        load_task("qa", seed=0, data=str(path))
    assert words in str(error.value)


def test_without_data_the_flag_is_named() -> None:
    with pytest.raises(ValueError, match="--task qa needs --data FILE.jsonl"):
        load_task("qa", seed=0)


def test_a_file_of_rlcrs_form_is_scored(tmp_path: Path) -> None:
    path = tmp_path / "qa.jsonl"
    lines = [{"problem": f"Question {i}?", "answer": [f"The {i}", "x"]} for i in range(60)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = load_task("qa", seed=0, data=str(path))
    example: Example = task.held_out(0)
    number = example.answer.removeprefix("The ")
    texts = [number, "So <answer> the X! </answer>", f"So {number}"]
    right = [task.score(example, text) for text in texts]
    assert right == [{"correct": 1}, {"correct": 1}, {"correct": 0}]
