"""The math task: answers found and compared, files as published, sums, and math-verify."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from minigrpo.tasks import math as math_task
from minigrpo.tasks.math import BOXED, HASHES, Math, MathVerify, final_answer, truth_of
from minigrpo.types import Example

from .tiny import refused
from .tiny import write_jsonl as write

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
    return Math(0).score(Example("?", truth), text)["correct"] == 1


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


def test_equal_numbers_are_equal_however_they_are_written() -> None:
    for row in EQUAL:
        for other in row[1:]:
            assert is_right(f"\\boxed{{{row[0]}}}", f"\\boxed{{{other}}}"), (row[0], other)
            assert is_right(f"\\boxed{{{other}}}", f"\\boxed{{{row[0]}}}"), (other, row[0])
    for truth, answer in DIFFERENT:
        assert not is_right(f"\\boxed{{{truth}}}", f"\\boxed{{{answer}}}"), (truth, answer)
        assert not is_right(f"\\boxed{{{answer}}}", f"\\boxed{{{truth}}}"), (answer, truth)


LINES = {  # what stands after ####, where 72 is right
    True: [
        *("72", "\\boxed{72}", "The answer is 72.", "Answer: 72 clips", "= 72", "(72)", "72.00"),
        *("72 clips in 2 months", "72 clips (48 + 24)", "48 + 24 = 72", "**Final answer:** 72"),
        *("$72/month", "72, not 70", "72<|im_end|>", "`72`", "x = 72 clips", "72\nThank you."),
        "72 clips" + " and so on" * 99,
    ],
    False: [
        *("", "73", "72.5", "7 2", "-72", "72/2", "72 or 73", "72 and 73", "5", "x", "6*72"),
        *("10^72", "72k", "72x", "The answer is 6*72", "7-72", "1 - 72 clips", "72^2", "72.5k"),
        *("70, not 72", "48 + 24 = 6*72", "7,2", "720", "72,5", "between 70 and 72"),
        *("72 × 4", "72 x 4", "72\\times 4", "72\\cdot(8)", "72÷2"),
    ],
}


def test_a_number_is_read_from_the_words_after_the_hashes() -> None:
    for right, lines in LINES.items():
        for line in lines:
            assert is_right("...\n#### 72", f"It is 48 + 24.\n#### {line}") == right, line
    # where the true answer is no number, words stay what they are
    assert is_right("...\n#### x+1", "#### x+1") and not is_right("...\n#### x+1", "#### 1")


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
    *("\\boxed{9^{9^{9^{9}}}}", "\\boxed{1000000!}", "\ud800\x00\u202e#### \ud800"),
]


def test_hostile_texts_score_nothing_in_bounded_time() -> None:
    task = Math(0)
    examples = [Example("?", solution) for solution in ("#### 42", "\\boxed{x^2}")]
    for text in HOSTILE:
        start = time.process_time()
        assert not any(task.score(example, text)["correct"] for example in examples), text[:40]
        assert time.process_time() - start < 0.5, text[:40]


def numbered(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"question": f"{i}+1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
        for i in range(start, start + count)
    ]


def test_lines_as_they_are_published(tmp_path: Path) -> None:
    test = write(tmp_path / "b.jsonl", [GSM8K, MATH, {"problem": "1+1?", "answer": "2"}])
    train = write(tmp_path / "a.jsonl", numbered(20))
    task, chat = (Math(0, [train], [test], chat) for chat in (False, True))
    clips, fractions, plain = (task.held_out(i) for i in range(3))
    assert clips.answer.endswith("24 in May.\n48+24 = 72 in all.\n#### 72")
    assert clips.fields == GSM8K and fractions.fields == MATH and fractions.kind == "Prealgebra"
    assert clips.prompt.startswith(f"Question: {GSM8K['question']}\n")
    assert clips.prompt.endswith(" #### and then the result as a number.\nAnswer:\n")
    assert "\\boxed{}" in fractions.prompt and "####" not in fractions.prompt
    assert chat.held_out(0).prompt.startswith(f"{GSM8K['question']}\n\nThink step by step.")
    assert truth_of(plain.answer) == (BOXED, "2") and "\\boxed{}" in plain.prompt
    for example, text, correct, form in [
        (clips, clips.answer, 1, 1),
        (clips, "#### 72\n#### 72", 1, 0),
        (clips, "#### 72\nAnd then?", 1, 0),
        (clips, "#### 71", 0, 1),
        (clips, "\\boxed{72}", 1, 0),
        (fractions, fractions.answer, 1, 1),
        (fractions, "It is 75%: \\boxed{0.75}", 1, 1),
        (fractions, "#### 3/4", 1, 0),
        (fractions, "So 3/4.", 0, 0),
    ]:
        assert task.score(example, text) == {"correct": correct, "format": form}, text
    broken = [{"question": "a", "answer": answer} for answer in (None, "", "there is\nno number")]
    for line in [*broken, {"question": " ", "answer": "#### 1"}]:
        refused(Math, 0, [write(tmp_path / "c.jsonl", [*numbered(60), line])])


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
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that has the name and the functions of math-verify."""
    file = tmp_path / "math_verify.py"
    file.write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    return file


def test_the_library_runs_in_a_process_whose_time_and_memory_are_bounded(library: Path) -> None:
    judge = MathVerify()
    texts = ["y", "huge", "memory", "exit", "print", "raise", "x"]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda x: judge.same("x", x), texts)) == [x == "x" for x in texts]
    process, pipe = judge.workers.idle.get()
    pipe.close()
    assert process.wait(5) == 0  # it ends with the run


def test_numbers_are_compared_without_the_library_and_formulas_with_it(library: Path) -> None:
    task = Math(0)
    task.verifier = MathVerify()
    assert task.score(Example("?", "#### 1"), "#### 1.0")["correct"] == 1
    assert task.score(Example("?", "\\boxed{1}"), "\\boxed{2}")["correct"] == 0
    assert not task.verifier.same.cache_info().currsize
    for text, correct in (("x", 1), (" x ", 1), ("y", 0), ("x" * 2000, 0)):
        assert task.score(Example("?", "\\boxed{x}"), f"\\boxed{{{text}}}")["correct"] == correct
    assert task.verifier.same.cache_info().currsize == 1  # y alone
    library.write_text("raise ImportError")
    refused(MathVerify)


@pytest.mark.peer
def test_math_verify_compares_formulas(tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    task = Math(0, [write(tmp_path / "a.jsonl", [*numbered(60), MATH])])
    assert task.verifier
    pairs = {
        ("\\frac{\\sqrt{3}}{2}", "\\sqrt{3}/2"): 1,
        ("x^2+2x+1", "(x+1)^2"): 1,
        ("\\{1,2\\}", "\\{2,1\\}"): 1,
        ("5", "2+3"): 1,
        ("\\sqrt{2}", "\\sqrt{3}"): 0,
        ("x", "9^{9^{9^{9}}}"): 0,
    }
    for (truth, answer), correct in pairs.items():
        example = Example("?", f"\\boxed{{{truth}}}")
        assert task.score(example, f"\\boxed{{{answer}}}")["correct"] == correct, (truth, answer)
