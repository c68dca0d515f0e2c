"""The math task: answers found and compared, hostile texts, files as published, sums, the judge."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minigrpo import Config
from minigrpo.runtime import announce
from minigrpo.runtime.flags import ConfigError
from minigrpo.tasks import math_judge
from minigrpo.tasks.files import is_test
from minigrpo.tasks.math import Math, MathFiles
from minigrpo.tasks.math_answers import final_answer, number, same_answer
from minigrpo.tasks.math_judge import MathVerify, Numbers, make_judge
from minigrpo.tasks.registry import load_task
from minigrpo.tasks.sums import Sums
from minigrpo.tools import train
from minigrpo.types import Example

from .chat_model import write_lines, write_model


@pytest.fixture(autouse=True)
def no_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests do not depend on whether math-verify is installed."""
    if not request.node.get_closest_marker("peer"):
        monkeypatch.setattr(math_judge, "find_spec", lambda name: None)


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

# --- answers --------------------------------------------------------------------------------------

EQUAL = [
    ("1/2", "0.5", ".50", "\\frac{1}{2}", "\\dfrac12", "$\\frac 12$", "5e-1", "x = 1/2", "+0.5"),
    (
        "-3/2",
        "-1.5",
        "-1 1/2",
        "\u22121.5",
        "-1\\frac{1}{2}",
        "\\frac{-3}{2}",
        "- 1.5",
        "-\\frac32",
    ),
    ("1234", "1,234", "$1,234", "1234.00", "\\$1{,}234", "1234 dollars", "1\\,234", "**1,234**"),
    ("3/4", "\\left(\\frac{3}{4}\\right)", "{\\frac34}", "\\displaystyle\\cfrac{3}{4}", "(3/4)"),
    ("7", "7\\text{ m}", "7\\mathrm{~m}", "\\[7\\]", "\\textbf{7}", "7\\;\\text{cm}", "7°"),
    ("5", "5 cm", "5\\text{ cm}", "5 square feet", "5 cm^2", "$5$", "5.", "5^\\circ", "5 km/h"),
    ("50%", "50", "0.5", "50\\%", "50 percent", "1/2"),
    ("-5", "-$5", "$-5", "-5 dollars"),
    ("\\frac{x}{2}", "\\dfrac{x}{2}", " \\frac{x} {2}"),  # no numbers, the same but for layout
]
DIFFERENT = [
    ("50", "0.5"),
    ("5", "5 million"),
    ("5", "5 millions"),
    ("3", "3 halves"),
    ("2", "2 fifths"),
    ("5", "5x"),
    ("5", "5 pi"),
    ("5", "5\\pi"),
    ("3", "3 or 5"),
    ("12", "1,2"),
    ("12", "1 2"),
    ("56", "$5$ $6$"),
    ("5", "5\\text{ million}"),
    ("5", "5 squared"),
    ("1234", "(1,234)"),
    ("0.3333333333333333", "1/3"),
    ("0.1", "0.1000000000000000055511151231257827"),
    ("1", "1/0"),
    ("2", "1+1"),
    ("x", "y"),
    ("5", "-5"),
    ("1", "١"),  # a digit, but not one that the data is written in
]


def test_equal_numbers_are_equal_however_they_are_written() -> None:
    for row in EQUAL:
        for other in row[1:]:
            assert Numbers().same(row[0], other), (row[0], other)
            assert Numbers().same(other, row[0]), (other, row[0])
    for truth, answer in DIFFERENT:
        assert not Numbers().same(truth, answer), (truth, answer)
        assert not Numbers().same(answer, truth), (answer, truth)


@settings(max_examples=30)
@given(st.fractions(-(10**9), 10**9, max_denominator=10**6), st.integers(0, 12))
def test_numbers_are_exact(value: Fraction, digits: int) -> None:
    top, bottom = value.numerator, value.denominator
    assert same_answer(str(value), f"\\frac{{{top}}}{{{bottom}}}") is True
    assert same_answer(str(top), f"{top:,}") is True
    rounded = Decimal(round(value * 10**digits)).scaleb(-digits)
    assert same_answer(str(value), f"{rounded:f}") is (value == Fraction(rounded))


TEXTS = {
    "\\boxed{1} so \\boxed{\\frac{1}{2}}.": "\\frac{1}{2}",
    "\\boxed{3} and \\boxed{4": "3",  # the second is cut off
    "\\boxed{\\boxed{7}}": "7",
    "\\boxed{\\{1,2\\}}": "\\{1,2\\}",
    "$\\boxed 2$ #### 3": "2",
    "\\boxed{} #### 3": "3",
    "a\n#### 1,234\n": "1,234",
    "#### 1\n#### 2 clips\nThank you.": "2 clips",
    "<answer>1</answer><answer> The answer is 2. </answer>": "2",
    "<answer>\\boxed{2}</answer>": "2",
    "The answer is 1. No, the answer is $5. There are 7.": "$5",
    "Final Answer: **72**": "72",
    "The answer is that she has 72 clips": "72",
    "so the answer is $x^2$, 4": "$x^2$, 4",
    "7-3": "3",
    "from 5 to -3.5": "-3.5",
    "it is 1,234.5, not more": "1,234.5",
    "x 3/4.": "3/4",
    "nothing": None,
    "": None,
}


LINES = {  # what stands after ####
    True: [
        *("72", "\\boxed{72}", "$\\boxed{72}$", "The answer is 72.", "Answer: 72 clips", "= 72"),
        *("72 clips (48 + 24)", "48 + 24 = 72", "**Final answer:** 72", "$72/month", "72, not 70"),
        *("<answer>72</answer>", "Natalia sold 72 clips", "(72)", "72<|im_end|>", "`72`"),
        *("72 = 48 + 24", "72 = 6*12", "**72** clips", "Answer - 72", "Total: 72 clips", "72kg"),
        *("24 x 3 = 72 clips", "Option B: 72", "a total of 72 times", "Day 1: 72"),
        *("The answer is 72 clips (48 + 24).", "72 not 70", "not 70, 72", "The answer isn't 7, 72"),
        *("72 quarters", "72 and that is all", "about 72", "\u221272 + 144 = 72"),
    ],
    False: [
        *("73", "72.5", "7 2", "72 million", "-72", "72/2", "72 or 73", "5", "x"),
        *("not 72", "It is not 72.", "The answer is not 72", "isn\u2019t 72", "never 72", "!= 72"),
        *("\\neq 72", "<answer>not 72</answer>", "70, not 72", "not 72 (48 + 24)"),
        *("6*72", "6 * 72", "10^72", "minus 72", "negative 72", "8:72", "72k", "72M", "72 pi"),
        *("It is 6*72.", "The answer is 6*72", "7-72", "1 - 72 clips", "sqrt(72)", "x*72", "72x"),
        *("\u221272, below 0", "It is \u201072", "\uff0d72", "\u00b172", "72\u00b2"),
        *("72 and a half", "72 halves", "72 sixteenths", "72 ten-thousands", "1 and 72"),
        *("> 72", "\u2264 72", "less than 72", "anything other than 72", "between 4 and 72"),
        *("70 or 72", "half of 72", "7 72 clips", "72^n", "48 + 24 = 6*72", "1/2/72", "72*k"),
    ],
}


@pytest.mark.parametrize("right", LINES)
def test_a_number_is_found_in_the_words_after_the_hashes(right: bool) -> None:
    task = Math(Sums(0), Numbers())
    example = Example("", "...\n#### 72")
    texts = [f"It is 48 + 24.\n#### {line}" for line in LINES[right]]
    scores = task.score_batch([example] * len(texts), texts)["correct"]
    assert dict(zip(texts, scores, strict=True)) == dict.fromkeys(texts, float(right))
    # where the true answer is no number, words stay what they are
    formula = Example("", "...\n#### x+1")
    assert task.score_batch([formula] * 2, ["#### x + 1", "#### 1"])["correct"].tolist() == [1, 0]


def test_the_final_answer_of_a_text() -> None:
    found = {text: final_answer(text) for text in TEXTS}
    assert found == TEXTS
    # the form that the prompt asks for comes first
    assert final_answer("\\boxed{1} #### 2", "####") == "2"


HOSTILE = [
    "\\boxed{" * 50_000,
    "\\boxed{" * 3_000 + "}" * 3_000,
    "{" * 200_000,
    "\\frac" * 50_000 + "{1}{2}",
    "1," * 100_000,
    "1,111" * 50_000,
    "9" * 200_000,
    "9" * 5_000 + "/" + "7" * 5_000,
    "\\boxed{" + "9" * 900 + "}",
    "1e99999999999",
    "#### 1e-99",
    "\\boxed{9^{9^{9^{9}}}}",
    "\\boxed{1000000!}",
    "answer is " * 30_000,
    "answer" + " " * 200_000 + ":",
    "<answer>" * 30_000 + "</answer>" * 30_000,
    "####" * 60_000,
    "5 " + "aa " * 300,
    "5" + " " * 900 + "!",
    "-" * 100_000 + "$" * 100_000,
    "\ud800\x00\u202e#### \ud800",
    "__import__('os').system('true')",
    "1/" * 100_000,
    "\\text{" * 300,
]


def test_hostile_texts_score_nothing_in_bounded_time() -> None:
    task = Math(Sums(0), Numbers())
    examples = [Example("?", solution) for solution in ("#### 42", "\\boxed{x^2}")]
    for text in HOSTILE:
        start = time.process_time()
        scores = [task.score(example, text) for example in examples]
        assert time.process_time() - start < 0.5, text[:40]
        assert all(score["correct"] == 0 for score in scores), text[:40]


@settings(max_examples=30)
@given(st.text(st.sampled_from("0123456789.,/$%\\{}-#= boxedfrac\n\ud800é"), max_size=40))
def test_any_text_is_scored(text: str) -> None:
    task = Math(Sums(0), Numbers())
    scores = task.score(Example("?", "so\n#### 42"), text)
    assert set(scores.values()) <= {0.0, 1.0}
    assert number(text) is None or same_answer(text, text)


# --- files ----------------------------------------------------------------------------------------


def numbered(count: int, start: int = 0) -> list[dict[str, Any]]:
    """Lines in GSM8K's format."""
    return [
        {"question": f"{i}+1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
        for i in range(start, start + count)
    ]


class Told:
    """A listener that keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.warn = self.warnings.append


def files(*paths: Path, chat: bool = False, listener: Any = None) -> MathFiles:
    return MathFiles(paths, 0, chat=chat, listener=listener)


def test_lines_as_they_are_published(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [GSM8K, MATH, *numbered(60)])
    plain, chat = (files(path, chat=chat) for chat in (False, True))
    found = {p.question: p.example for p in plain.problems}
    clips, fractions = found[GSM8K["question"]], found[MATH["problem"]]
    assert clips.answer.endswith("24 in May.\n48+24 = 72 in all.\n#### 72")
    assert clips.fields == GSM8K and fractions.fields == MATH and fractions.kind == "Prealgebra"
    assert clips.prompt.startswith(f"Question: {GSM8K['question']}\n")
    assert clips.prompt.endswith(" #### and then the result as a number.\nAnswer:\n")
    assert "\\boxed{}" in fractions.prompt and "####" not in fractions.prompt
    asked = chat.problems[0].example.prompt
    assert asked.startswith(f"{GSM8K['question']}\n\nThink step by step.")
    task = load_task("math", seed=0, data=str(path))
    for problem in plain.problems:  # a true answer scores 1 in every part
        assert set(task.score(problem.example, problem.example.answer).values()) == {1.0}
    scores = task.score(fractions, "It is 75%, \\boxed{0.75}")
    assert scores == {"correct": 1.0, "format": 1.0}
    assert task.score(fractions, "So 3/4.") == {"correct": 1.0, "format": 0.0}
    assert task.score(clips, "#### 72\n#### 72") == {"correct": 1.0, "format": 0.0}
    assert task.score(clips, "#### 71") == {"correct": 0.0, "format": 1.0}


def test_splits_are_those_of_other_files_or_a_test_file_of_its_own(tmp_path: Path) -> None:
    train = write_lines(tmp_path / "train.jsonl", numbered(200))
    test = write_lines(tmp_path / "gsm8k_test.jsonl", numbered(30, start=195))
    assert is_test(test) and not is_test(Path("latest.jsonl"))
    one, told = files(train), Told()
    both = files(train, test, listener=told)
    assert 5 < one.num_held_out < 40 and one.num_train + one.num_held_out == 200
    assert (both.num_train, both.num_held_out) == (195, 30)
    assert told.warnings == [
        f"{test}: 5 of its questions are in the training file too, and are left out of training"
    ]
    for source in (one, both):
        asked = [source.train(i).prompt for i in range(source.num_train)]
        held_out = {source.held_out(i).prompt for i in range(source.num_held_out)}
        assert len(set(asked)) == source.num_train and not held_out & set(asked)
    alone = files(test)  # nothing else is there to train on
    assert 0 < alone.num_held_out < 10 and alone.num_train + alone.num_held_out == 30
    # a copy with other blanks is a copy
    blanks = [{**x, "question": x["question"].replace("+", " \n+")} for x in numbered(200)]
    spaced = write_lines(tmp_path / "blanks.jsonl", blanks)
    plain = [{**x, "question": x["question"].replace("+", " +")} for x in numbered(30)]
    of_test = write_lines(tmp_path / "test.jsonl", plain)
    assert files(spaced, of_test).num_train == 170


def test_lines_that_are_no_problems_are_skipped_and_named(tmp_path: Path) -> None:
    bad = [
        {"question": "a"},
        {"question": "a", "answer": "no number"},
        {"problem": "a", "solution": "\\boxed{}"},
        {"question": " ", "answer": "#### 1"},
        {"question": 3, "answer": "#### 1"},
        {"question": "a", "answer": "#### 1", "type": "\ud800"},
        ["a"],
    ]
    told = Told()
    path = write_lines(tmp_path / "a.jsonl", [*bad, *numbered(60)])
    assert len(files(path, listener=told).problems) == 60
    (warning,) = told.warnings
    assert "skipped 7 of 67 lines: line 1 (must be an object with question and answer" in warning
    assert "line 2 (the solution has no final answer after #### or in \\boxed{})" in warning


def test_formulas_need_math_verify_and_that_is_said(tmp_path: Path) -> None:
    told, root = Told(), {**MATH, "problem": "?", "solution": "\\boxed{\\sqrt{2}}"}
    path = write_lines(tmp_path / "a.jsonl", [MATH, root, *numbered(60)])
    task = load_task("math", seed=0, data=str(path), listener=told)  # type: ignore[arg-type]
    assert task.judged_by == "exact numbers" and len(told.warnings) == 1
    assert "1 of 62 answers are no numbers; without math-verify" in told.warnings[0]


# --- sums -----------------------------------------------------------------------------------------


def test_sums_are_right_and_their_splits_share_nothing() -> None:
    sums = Sums(3)
    examples = [sums.train(i) for i in range(400)]
    held_out = [sums.held_out(i) for i in range(400)]
    assert not {e.prompt for e in examples} & {e.prompt for e in held_out}
    assert examples == [Sums(3).train(i) for i in range(400)]
    for example in (*examples, *held_out):
        terms = [int(x) for x in example.prompt.removesuffix("=").split("+")]
        steps, _, total = example.answer.partition("####")
        assert int(total) == sum(terms) and example.kind == f"{len(terms)} numbers"
        sums = [sum(terms[:size]) for size in range(2, len(terms) + 1)]
        assert [*map(int, steps.split(","))] == sums
    task = load_task("math", seed=3)
    assert task.judged_by == "exact numbers"
    table = task.score_batch(examples, [e.answer for e in examples])
    assert all((scores == 1).all() for scores in table.values())


# --- runs -----------------------------------------------------------------------------------------


def test_the_preset_trains_a_chat_model_and_a_resume_notices_another_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One step on a small random model of the preset's family."""
    monkeypatch.chdir(tmp_path)
    model = write_model(tmp_path / "model", context=400)
    write_lines(tmp_path / "train.jsonl", numbered(40))
    write_lines(tmp_path / "test.jsonl", numbered(8, start=40))
    small = {
        "init_from": model,
        "max_new_tokens": 8,
        "eval_every": 0,
        "group_size": 2,
        "out_dir": "run",
    }
    argv = ["--config", "gsm8k", *(f"--{k.replace('_', '-')}={x}" for k, x in small.items())]
    argv += ["--max-steps=2", "--stop-after=1", "--device=cpu", "--out-dir=run"]
    train.main(argv)
    said = " ".join(capsys.readouterr().out.split())
    assert "reward: 1 x correct + 0.1 x format" in said
    assert "task: test.jsonl is held out; answers are compared by exact numbers" in said
    first = json.loads((tmp_path / "run" / "eval.jsonl").read_text().splitlines()[0])
    assert first["n"] == 8 and {"correct", "correct_sampled", "format_sampled"} <= first.keys()
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert {"rewards/correct/mean", "rewards/format/mean"} <= metrics.keys()

    monkeypatch.setattr(Numbers, "name", "something else")
    train.main(["--config", "run/config.toml", "--out-dir", "run", "--resume", "auto"])
    said = " ".join(capsys.readouterr().err.split())
    assert "answers were compared by exact numbers when the checkpoint was written, and" in said


def test_files_have_other_settings_than_sums_and_a_given_one_counts_before_both() -> None:
    sums, files = Config.of(task="math"), Config.of(task="math", data="a.jsonl")
    chess = Config.of(data="a.jsonl")
    lengths = [config.sampling.max_new_tokens for config in (sums, files, chess)]
    assert lengths == [32, 512, 96]
    assert sums.replace(data="a.jsonl") == files and files.replace(data="") == sums
    assert files.replace(task="chess-env") == chess
    assert Config.of(task="math", data="a.jsonl", max_new_tokens=9).sampling.max_new_tokens == 9


def test_completions_that_are_cut_are_warned_of_once() -> None:
    told = Told()
    watch = announce.SignalWatch(told, is_main=True)  # type: ignore[arg-type]
    for share in [0.6] * 19 + [0.4] + [0.6] * 30:
        watch.add({"completions/clipped_ratio": share, "frac_reward_zero_std": 0.0})
    (warning,) = told.warnings
    assert warning.startswith(
        "for 20 steps at least half of the completions were cut off at --max-"
    )


# --- the judge ------------------------------------------------------------------------------------

LIBRARY = """
import os, signal, time
def parse(text, parsing_timeout):
    assert parsing_timeout is None
    return text.strip("$")
def verify(truth, answer, timeout_seconds):
    if answer == "hang":
        while True:
            pass
    if answer == "huge":
        return pow(9, 9 ** 9)
    if answer == "memory":
        return len(bytearray(1 << 40))
    if answer == "exit":
        os._exit(0)
    if answer == "print":
        print("1", flush=True)
        return False
    if answer == "killed" and not os.path.exists(MARK):
        open(MARK, "w").close()
        os.kill(os.getpid(), signal.SIGTERM)
    if answer == "raise":
        raise RecursionError
    return truth == answer or answer == "killed"
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that has the name and the functions of math-verify."""
    file = tmp_path / "lib" / "math_verify.py"
    metadata = tmp_path / "lib" / "math_verify-9.9.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: math-verify\nVersion: 9.9\n")
    file.write_text(f"MARK = {str(tmp_path / 'mark')!r}\n{LIBRARY}")
    monkeypatch.syspath_prepend(str(file.parent))
    monkeypatch.setenv("PYTHONPATH", str(file.parent))
    monkeypatch.setattr(math_judge, "LIMIT_S", 0.2)
    monkeypatch.setattr(math_judge, "find_spec", find_spec)
    return file


def test_the_library_judges_in_a_process_whose_time_and_memory_are_bounded(library: Path) -> None:
    judge = make_judge()
    assert isinstance(judge, MathVerify) and "math-verify 9.9 for other formulas" in judge.name
    assert judge.same("1/2", "0.5") and not judge._verdict.cache_info().currsize  # not asked
    texts = ["y", "hang", "huge", "memory", "exit", "print", "raise", "x", "killed", "x" * 2000]
    start = time.monotonic()
    assert [judge.same("x", text) for text in texts] == [text in ("x", "killed") for text in texts]
    assert time.monotonic() - start < 10
    (worker,) = judge._idle
    worker.questions.close()
    assert worker.process.wait(5) == 0  # it ends with its input


def test_a_library_that_cannot_be_imported_is_one_line(library: Path) -> None:
    library.write_text("raise ImportError('no antlr\\nhere')")
    with pytest.raises(ConfigError, match=r"cannot be used \(ImportError: no antlr here\)"):
        make_judge()


@pytest.mark.peer
def test_math_verify_compares_formulas_in_threads() -> None:
    pytest.importorskip("math_verify")
    judge = make_judge()
    assert isinstance(judge, MathVerify)
    pairs = {
        ("\\frac{\\sqrt{3}}{2}", "\\sqrt{3}/2"): True,
        ("x^2+2x+1", "(x+1)^2"): True,
        ("(1,2)", "(1, 2)"): True,
        ("\\{1,2\\}", "\\{2,1\\}"): True,
        ("(-\\infty, 3]", "(-\\infty,3]"): True,
        ("5", "2+3"): True,
        ("\\sqrt{2}", "\\sqrt{3}"): False,
        ("x", "9^{9^{9^{9}}}"): False,
        ("x", "10000000!"): False,
    }
    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(judge.same, *zip(*pairs, strict=True)))
    assert dict(zip(pairs, found, strict=True)) == pairs
    assert time.monotonic() - start < 60
