"""The math task: answers found and compared, files as published, and math-verify."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from minigrpo.runtime.calls import WorkerProcesses
from minigrpo.tasks import math as math_task
from minigrpo.tasks.math import BOXED, HASHES, Math, final_answer, same_formula, truth_of
from minigrpo.types import Example

from .tiny import refused

GSM8K = {
    "question": "Natalia sold 48 clips in April and half as many in May. How many in all?",
    "answer": "She sold 48/2 = <<48/2=24>>24 in May.\n48+24 = <<48+24=72>>72 in all.\n#### 72",
}
MATH = {
    "problem": "What is $\\frac{1}{2}+\\frac{1}{4}$?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": "It is $\\frac{2}{4}+\\frac{1}{4}=\\boxed{\\frac{3}{4}}$.",
}


@pytest.fixture(autouse=True)
def no_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests do not depend on whether math-verify is installed."""
    if not request.node.get_closest_marker("peer"):
        monkeypatch.setattr(math_task, "find_spec", lambda name: None)


def is_right(truth: str, text: str) -> bool:
    return Math(0, [numbered(60)]).score(Example("?", truth), text)["correct"] == 1


EQUAL = [
    ("1/2", "0.5", ".50", "$1/2$", "\\frac{1}{2}", "\\dfrac{1}{2}"),
    ("-3/2", "-1.5", "\u22121.5", "- 1.5", "-\\frac{3}{2}", "\\frac{-3}{2}"),
    ("1234", "1,234", "$1,234", "1234.00", "\\$1{,}234", "1\\,234", "**1,234**"),
    ("50%", "50", "50\\%", "50."),
    ("-5", "-$5", "$-5"),
]
DIFFERENT = [
    *(("50", "0.5"), ("5", "5 million"), ("5", "5x"), ("5", "5\\pi"), ("x", "y"), ("5", "-5")),
    *(("3", "3 or 5"), ("12", "1,2"), ("12", "1 2"), ("56", "$5$ $6$"), ("1234", "(1,234)")),
    *(("0.3333333333333333", "1/3"), ("0.1", "0.1000000000000000055"), ("1", "1/0")),
    *(("2", "1+1"), ("3/2", "1\\frac{1}{2}")),
]


def test_numbers_are_compared_by_value_however_they_are_written() -> None:
    def same_formula(one: str, other: str) -> set[bool]:
        boxed = [f"\\boxed{{{number}}}" for number in (one, other)]
        return {is_right(*boxed), is_right(*reversed(boxed))}

    for first, *others in EQUAL:
        for other in others:
            assert same_formula(first, other) == {True}, (first, other)
    for one, other in DIFFERENT:
        assert same_formula(one, other) == {False}, (one, other)


LINES = {  # what stands after ####, where 72 is right
    True: [
        *("72", "\\boxed{72}", "The answer is 72.", "Answer: 72 clips", "= 72", "(72)", "72.00"),
        *("72 clips in 2 months", "72 clips (48 + 24)", "48 + 24 = 72", "**Final answer:** 72"),
        *("$72/month", "72, not 70", "72<|im_end|>", "`72`", "x = 72 clips", "72\nThank you."),
    ],
    False: [
        *("", "73", "72.5", "7 2", "-72", "72/2", "72 or 73", "5", "x", "6*72", "72,5"),
        *("10^72", "72k", "72x", "The answer is 6*72", "7-72", "1 - 72 clips", "72^2", "72.5k"),
        *("70, not 72", "48 + 24 = 6*72", "7,2", "720", "between 70 and 72"),
        *("72 × 4", "72 x 4", "72\\times 4", "72\\cdot(8)", "72÷2"),
    ],
}


def test_a_number_is_read_from_the_words_after_the_hashes() -> None:
    for right, lines in LINES.items():
        for line in lines:
            assert is_right("...\n#### 72", f"It is 48 + 24.\n#### {line}") == right, line
    # where the true answer is no number, words stay what they are
    assert is_right("...\n#### x+1", "#### x+1")
    assert not is_right("...\n#### x+1", "#### 1")


def test_the_final_answer_of_a_text() -> None:
    texts = {
        "\\boxed{1} so \\boxed{\\frac{1}{2}}.": "\\frac{1}{2}",
        "#### 3 and \\boxed{4": "3 and \\boxed{4",  # cut off
        "\\boxed{\\boxed{7}}": "7",
        "\\boxed{\\{1,2\\}}": "\\{1,2\\}",
        "\\boxed{} #### 3": "3",
        "\\boxed{1}, no: \\fbox{\\frac{2}{3}}.": "\\frac{2}{3}",
        "So $\\boxed -1.5$.": "-1.5",
        "\\boxed {5} is in a \\boxed form": "5",
        "#### 1\n#### 2 clips\nThank you.": "2 clips",
        "It is 7.": "",  # in neither form
    }
    assert {text: final_answer(text, BOXED) for text in texts} == texts
    assert final_answer("\\boxed{1} #### 2", HASHES) == "2"  # the requested form comes first


HOSTILE = [
    *("\\boxed{" * 50_000, "\\boxed{" * 3_000 + "}" * 3_000, "{" * 200_000, "####" * 60_000),
    *("\\frac" * 50_000 + "{1}{2}", "1," * 100_000, "1,111" * 50_000, "9" * 200_000),
    *("#### " + "9" * 5_000 + "/" + "7" * 5_000, "\\boxed{" + "9" * 900 + "}", "1e99999999999"),
    *("#### " + "is " * 6_000, "#### " + "= " * 9_000, "#### 5" + " " * 15_000 + "!"),
    *("\\boxed{9^{9^{9^{9}}}}", "\ud800\x00\u202e#### \ud800"),
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_score_nothing(text: str) -> None:
    for solution in ("#### 42", "\\boxed{x^2}"):
        assert not is_right(solution, text)


def numbered(count: int) -> list[dict[str, Any]]:
    return [
        {"question": f"{i}+1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
        for i in range(count)
    ]


def published(chat: bool = False) -> list[Example]:
    """Held-out examples of GSM8K, of MATH, and with an answer alone."""
    plain = {"problem": "1+1?", "answer": "2"}
    task = Math(0, [numbered(20)], [[GSM8K, MATH, plain]], chat)
    return [task.held_out(i) for i in range(3)]


def test_published_lines_ask_for_the_form_of_their_answers() -> None:
    clips, fractions, plain = published()
    assert clips.prompt.startswith(f"Question: {GSM8K['question']}\n")
    assert "####" in clips.prompt
    assert "\\boxed{}" in fractions.prompt
    assert "\\boxed{}" in plain.prompt
    assert truth_of(plain.answer) == (BOXED, "2")
    assert clips.answer.endswith("24 in May.\n48+24 = 72 in all.\n#### 72")
    assert clips.fields == GSM8K
    assert fractions.fields == MATH
    assert fractions.kind == "Prealgebra"
    assert published(chat=True)[0].prompt.startswith(f"{GSM8K['question']}\n\n")


SCORES = {  # by line: texts with their values and forms
    GSM8K["answer"]: {
        GSM8K["answer"]: (1, 1),
        "#### 72\n#### 72": (1, 0),
        "#### 72\nAnd then?": (1, 0),
        "#### 71": (0, 1),
        "\\boxed{72}": (1, 0),
    },
    MATH["solution"]: {
        MATH["solution"]: (1, 1),
        "It is 75%: \\boxed{0.75}": (1, 1),
        "#### 3/4": (1, 0),
        "So 3/4.": (0, 0),
    },
}


@pytest.mark.parametrize("truth", SCORES, ids=["GSM8K", "MATH"])
def test_an_answer_is_scored_by_value_and_form(truth: str) -> None:
    for text, (correct, form) in SCORES[truth].items():
        scores = Math(0, [numbered(60)]).score(Example("?", truth), text)
        assert scores == {"correct": correct, "format": form}, text


@pytest.mark.parametrize("answer", [None, "", "there is\nno number"])
def test_a_line_without_a_true_answer_is_refused(answer: str | None) -> None:
    refused(Math, 0, [[*numbered(60), {"question": "a", "answer": answer}]])


LIBRARY = """
import os
def parse(text, parsing_timeout):
    assert parsing_timeout is None
    return text.strip("$")
def verify(truth, answer, timeout_seconds):
    if answer == "huge":
        return pow(9, 9 ** 9)
    if answer == "memory":
        return len(bytearray(1 << 40))
    if answer == "exit":
        os._exit(0)
    if answer == "print":
        print("1", flush=True)
        return False
    if answer == "raise":
        raise RecursionError
    return truth == answer
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that has the name and the functions of math-verify."""
    file = tmp_path / "math_verify.py"
    file.write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    workers = WorkerProcesses("minigrpo.tasks.math_verify_worker", "same")
    monkeypatch.setattr(math_task, "workers", workers)
    monkeypatch.setattr(math_task, "find_spec", find_spec)
    same_formula.cache_clear()
    yield file
    same_formula.cache_clear()


def test_the_library_runs_in_a_process_whose_time_and_memory_are_bounded(library: Path) -> None:
    texts = ["y", "huge", "memory", "exit", "print", "raise", "x"]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda x: same_formula("x", x), texts)) == [x == "x" for x in texts]
    process, pipe = math_task.workers.idle.get()
    pipe.close()
    assert process.wait(5) == 0  # it ends with the run


@pytest.mark.usefixtures("library")
def test_numbers_are_compared_without_the_library_and_formulas_with_it() -> None:
    task = Math(0, [numbered(60)])
    same_formula.cache_clear()
    assert task.score(Example("?", "#### 1"), "#### 1.0")["correct"] == 1
    assert task.score(Example("?", "\\boxed{1}"), "\\boxed{2}")["correct"] == 0
    assert not same_formula.cache_info().currsize
    for text, correct in (("x", 1), (" x ", 1), ("y", 0), ("x" * 2000, 0)):
        assert task.score(Example("?", "\\boxed{x}"), f"\\boxed{{{text}}}")["correct"] == correct
    assert same_formula.cache_info().currsize == 1  # y alone


def test_a_library_that_cannot_be_imported_is_refused(library: Path) -> None:
    library.write_text("raise ImportError")
    refused(Math, 0, [numbered(60)])


PAIRS = [  # a true answer, another one, and whether it is right
    ("\\frac{\\sqrt{3}}{2}", "\\sqrt{3}/2", 1),
    ("x^2+2x+1", "(x+1)^2", 1),
    ("\\{1,2\\}", "\\{2,1\\}", 1),
    ("5", "2+3", 1),
    ("\\sqrt{2}", "\\sqrt{3}", 0),
    ("x", "9^{9^{9^{9}}}", 0),
]


@pytest.mark.peer
def test_math_verify_compares_formulas() -> None:
    task = Math(0, [[*numbered(60), MATH]])
    assert task.has_verifier
    for truth, answer, correct in PAIRS:
        example = Example("?", f"\\boxed{{{truth}}}")
        assert task.score(example, f"\\boxed{{{answer}}}")["correct"] == correct, (truth, answer)
