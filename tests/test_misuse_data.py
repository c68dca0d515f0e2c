"""Misuse of data files, model files, tasks and rewards of one's own.

Each case ends in one line that names the flag or the file and what is allowed, before any work, or
in a result that is right. The ids are the numbers of a list of attacks.
"""

import gzip
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from minigrpo import Config, Trainer
from minigrpo.evaluate import evaluate
from minigrpo.model.shape import ModelShape
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.model.transformer import Transformer
from minigrpo.model.weights import export_model
from minigrpo.rewards import RewardFunction, RewardScorer, reward
from minigrpo.runtime.build import make_model
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.logging import Screen
from minigrpo.runtime.pool import WorkerPool
from minigrpo.runtime.process_state import STATE
from minigrpo.runtime.reward_calls import BadRewardError, RewardSource
from minigrpo.runtime.reward_weights import weighted_sum
from minigrpo.runtime.rng import weights_seed
from minigrpo.tasks.confidence import with_confidence
from minigrpo.tasks.games import Games
from minigrpo.tasks.own import load_own_task
from minigrpo.tasks.pairs import Pairs
from minigrpo.tasks.registry import load_rewards, load_task
from minigrpo.tools.loading import ModelSelection, load
from minigrpo.types import Example

from .gradients import TINY
from .test_games import SMALL, Heard

NULL = {**TINY, "reward_weights": "", "eval_every": 0, "max_steps": 2}
SUMS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(400)]


def attack(number: str, *values: Any) -> Any:
    return pytest.param(*values, id=f"attack {number}")


def refused(call: Callable[[], object]) -> str:
    """The message of the ValueError that a call raises, which must be a single line."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the caller looks at the message
        call()
    message = str(error.value)
    assert message.isprintable() and len(message) < 700
    return message


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(folder: Path, **changes: Any) -> Trainer:
    settings = {**NULL, "out_dir": str(folder / "run"), **changes}
    return Trainer(Config.of(**settings), quiet=True)


# --- lines of data --------------------------------------------------------------------------------

LONG = {"prompt": "1" * 100_000, "answer": "2"}
DEEP = "[" * 100_000
OBJECT = 'must be an object like {"prompt": "...", "answer": "..."}'


@pytest.mark.parametrize(
    ("row", "words"),
    [
        attack("12", r'{"prompt": "a", "answer": "\ud800"}', "answer has half of a surrogate pair"),
        attack("40", r'{"prompt": "\udfff", "answer": ""}', "prompt has half of a surrogate pair"),
        attack("25 a line", DEEP, f"{OBJECT} (brackets are nested too deeply)"),
        ('{"prompt": "a", "prompt": "b", "answer": ""}', "the key str 'prompt' occurs twice"),
        ('{"prompt": "a", "answer": null}', "answer is NoneType 'None'"),
        ('{"prompt": ["a"], "answer": "b"}', "prompt is list"),
        ('{"prompt": "a"}', "has no answer"),
        ("1" * 5000, OBJECT),
        ("NaN", OBJECT),
        ('{"prompt": "a", "answer": "b"', "Expecting ',' delimiter at column 30"),
    ],
)
def test_a_bad_line_is_refused_by_name(tmp_path: Path, row: str, words: str) -> None:
    path = jsonl(tmp_path / "data.jsonl", SUMS[:40])
    path.write_text(path.read_text() + row + "\n")
    message = refused(lambda: load_task("chess-env", seed=0, data=str(path)))
    assert message.startswith(f"--data {path}, line 41: ") and words in message


@pytest.mark.parametrize(
    ("rows", "changes", "words"),
    [
        attack(
            "4",
            [*SUMS[:212], LONG, *SUMS[212:]],
            {},
            "line 213: the prompt has at least 10000 tokens; at most 250 leave room for "
            "--max-new-tokens 6 in the model's context of 256",
        ),
        attack(
            "42",
            [*SUMS[:6], {"prompt": "abc", "answer": "x" * 400}, *SUMS[6:]],
            {"loss": "nll"},
            "line 7: the answer has 400 tokens; at most 252 fit the model's context of 256 after "
            "the prompt's 3",
        ),
    ],
)
def test_a_row_that_is_too_long_is_refused_before_any_work(
    tmp_path: Path, rows: list[dict[str, Any]], changes: dict[str, Any], words: str
) -> None:
    path = jsonl(tmp_path / "data.jsonl", rows)
    assert words in refused(lambda: start(tmp_path, data=str(path), **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("data", "2 of 402 answers .* the longest: --data {}, line 402, 9 tokens"),
        ("task", r"156 of 512 answers .* the longest: --task {}: Mine: train\(100\), 7 tokens"),
        ("task nll", r"156 of 512 answers .* the longest: --task {}: Mine: train\(100\), 7 tokens"),
    ],
)
def test_answers_that_no_completion_can_equal_are_counted_in_one_warning(
    tmp_path: Path, source: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """An answer of exactly --max-new-tokens can be written, without its end of text."""
    if source == "data":
        answers = ("123456", "1234567", "123456789")
        rows = [{"prompt": f"long {x}", "answer": x} for x in answers]
        path = jsonl(tmp_path / "data.jsonl", [*SUMS[:399], *rows])
        start(tmp_path, data=str(path))
    else:
        answer = TRAIN, "Example(f't{number}', '1' * (7 if number > 99 else 6))"
        path = own(tmp_path, answer)
        start(tmp_path, task=str(path), **({"loss": "nll"} if source == "task nll" else {}))
    said = capfd.readouterr().err
    assert said.count("are longer than --max-new-tokens 6, so no completion can equal them") == 1
    assert re.search(words.format(re.escape(str(path))), said), said


def test_rows_of_unequal_length_fit_if_each_fits(tmp_path: Path) -> None:
    """A long prompt and a long answer in one batch need not fit together."""
    rows = [
        {"prompt": f"{i}:" + "p" * (200 * (i % 2)), "answer": "a" * (200 - 200 * (i % 2))}
        for i in range(40)
    ]
    data = str(jsonl(tmp_path / "d.jsonl", rows))
    trainer = start(tmp_path, data=data, loss="nll", prompts_per_step=12)
    batch = trainer.source.batch(0)
    lengths = batch.completions
    assert lengths.prompt_len.max() + lengths.completion_mask.sum(-1).max() > 256
    assert np.isfinite(trainer.learner.learn(batch, 0)["loss"])


@pytest.mark.parametrize("history", [attack("3", 18)])
def test_an_endless_supply_is_checked_further_where_it_is_tight(
    tmp_path: Path, history: int
) -> None:
    message = refused(lambda: start(tmp_path, history=history, max_new_tokens=96))
    assert message.startswith("--task chess-env: train(")
    assert "at most 160 leave room for --max-new-tokens 96" in message


@pytest.mark.parametrize("encoding", [attack("41", "utf-8-sig"), "utf-8"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path, encoding: str) -> None:
    path = jsonl(tmp_path / "data.jsonl", SUMS)
    path.write_text(path.read_text(), encoding=encoding)
    pairs = Pairs([path], seed=0)
    assert {pairs.train(i).prompt for i in range(400)} <= {row["prompt"] for row in SUMS}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps(SUMS[0]).encode("utf-16"), "is UTF-16 text; convert it to UTF-8"),
        (gzip.compress(b"{}"), "is compressed with gzip; unpack it first"),
        (b'{"prompt": "\xff", "answer": ""}', "line 1: 'utf-8' codec can't decode byte 0xff"),
        (b'{"prompt": "a", "answer": "b"}\r{"prompt": "a"}', "line 1: has a carriage return"),
        (b"", "no pair for training"),
    ],
    ids=["UTF-16", "gzip", "bytes", "carriage return", "empty"],
)
def test_a_file_that_is_no_utf_8_text_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    message = refused(lambda: load_task("chess-env", seed=0, data=str(path)))
    assert str(path) in message and words in message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        attack("24", ",", "--data must name a file, or several separated by commas, got ','"),
        attack("43", "{sums},{sums}", "names .*sums.jsonl twice"),
        ("{sums},{folder}/../{folder.name}/sums.jsonl", "names .*sums.jsonl twice"),
        ("{sums},{others}", "0 usable .*; prompts and answers that are not about chess need"),
        ("{folder}/pipe.jsonl", "pipe.jsonl: cannot be read .it is not a regular file"),
        ("{folder}/folder.jsonl", "folder.jsonl: cannot be read .Is a directory"),
        ("a\udcff.jsonl", "the name is not valid UTF-8"),
        ("a\0.jsonl", "the name is not valid UTF-8"),
    ],
)
def test_what_data_names(tmp_path: Path, data: str, words: str) -> None:
    sums, others = (jsonl(tmp_path / name, SUMS) for name in ("sums.jsonl", "others.jsonl"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    named = data.format(sums=sums, others=others, folder=tmp_path)
    message = refused(lambda: load_task("chess-env", seed=0, data=named))
    assert message.startswith("--data ")
    assert re.search(words, message), message


@pytest.mark.parametrize("name", [attack("23", "😀.jsonl"), '"quoted\\ünd.jsonl'])
def test_a_file_may_have_any_name_that_can_be_written(tmp_path: Path, name: str) -> None:
    trainer = start(tmp_path, data=str(jsonl(tmp_path / name, SUMS)))
    trainer.run_dir.open_log(0).close()
    assert Config.from_toml(tmp_path / "run" / "config.toml").task.data == str(tmp_path / name)


def test_doubtful_pairs_are_warned_of_once_each_and_repeated_ones_are_evaluated_once(
    tmp_path: Path,
) -> None:
    heard = Heard()
    odd = [{"prompt": "0+0=", "answer": "1"}, {"prompt": "silence", "answer": ""}]
    path = jsonl(tmp_path / "data.jsonl", [*SUMS, *SUMS, *odd])
    pairs = Pairs([path], 0, heard)
    assert heard.warnings == [
        f"--data {path}: 1 answers are empty, the first in line 802",
        f"--data {path}: 1 prompts have another answer in an earlier line, the first in line 801 "
        "(see line 1); each line is a question of its own",
    ]
    held_out = [pairs.held_out(i) for i in range(pairs.num_held_out)]
    assert len({(x.prompt, x.answer) for x in held_out}) == len(held_out) > 20


# --- rewards --------------------------------------------------------------------------------------


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Stop(BaseException):
    def __str__(self) -> str:
        raise Stop

    __repr__ = __str__


class Recorder:
    """A task that says what it is asked to score."""

    parts = {"right": 1.0}  # noqa: RUF012

    def __init__(self) -> None:
        self.calls: list[tuple[Example, str]] = []

    def score(self, example: Example, text: str) -> dict[str, float]:
        self.calls.append((example, text))
        return {"right": float(text == example.answer)}


class Counter(Recorder):
    """Another task, with parts of the same name."""


@pytest.mark.parametrize("error", [attack("13", Unprintable), Stop, SystemExit, GeneratorExit])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_that_raises_anything_gets_its_floor(
    error: type[BaseException], workers: int
) -> None:
    @reward(floor=0.5)
    def odd(example: Example, text: str) -> float:
        raise error

    warnings: list[str] = []
    task: Any = Recorder()
    scorer = RewardScorer(task, functions=[odd], workers=workers, warn=warnings.append)
    table = scorer.score([Example("a", "b")], [["b", "c"]])
    scorer.close()
    assert table.parts["odd"].tolist() == [[0.5, 0.5]] and table.failures["odd"] == 2
    assert len(warnings) == 1 and error.__name__ in warnings[0] and "\n" not in warnings[0]


def test_a_returned_value_that_cannot_be_shown_gets_the_floor() -> None:
    @reward(floor=0.25)
    def odd(example: Example, text: str) -> Any:
        return Unprintable()

    scorer = RewardScorer(Recorder(), functions=[odd])  # type: ignore[arg-type]
    assert scorer.score([Example("a", "b")], [["b"]]).parts["odd"].item() == 0.25


@dataclass(frozen=True)
class Tagged(Example):
    tags: list[str] = field(default_factory=list)


class Loose(Example):
    """Equal to each other by the fields of `Example`, but not the same question."""

    def __init__(self, answer: str, extra: str) -> None:
        super().__init__("?", answer)
        object.__setattr__(self, "extra", extra)


@pytest.mark.parametrize(
    ("examples", "questions"),
    [
        attack("14", [Example("?", "a"), Example("?", "b")], 2),
        ([Tagged("?", "a", tags=["x"]), Tagged("?", "a", tags=["y"])], 2),
        ([Loose("a", "x"), Loose("a", "y")], 2),
        ([Example("?", ["a"]), Example("?", ["b"])], 2),  # type: ignore[arg-type]
        ([Example("?", "a"), Example("?", "a")], 1),
    ],
)
def test_a_completion_is_judged_by_its_own_example(examples: list[Example], questions: int) -> None:
    task = Recorder()
    table = RewardScorer(task).score(examples, [["a", "b", "a"]] * 2)  # type: ignore[arg-type]
    assert len(task.calls) == 2 * questions  # each distinct text of a question once
    assert {id(example) for example, _ in task.calls} == {id(x) for x in examples[:questions]}
    for row, example in zip(table.parts["right"], examples, strict=True):
        assert row.tolist() == [float(text == example.answer) for text in "aba"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        attack("32 weight", {"weight": "big"}, "weight must be a number from -1e.12 to 1e.12"),
        attack("32 floor", {"floor": "x"}, "floor must be a number"),
        attack("17 weight", {"weight": float("nan")}, "weight must be a number"),
        attack("17 floor", {"floor": float("nan")}, "floor must be a number"),
        attack("17 text", {"timeout_s": "x"}, "timeout_s must be a number"),
        attack("17 negative", {"timeout_s": -1}, "timeout_s must be above 0, got -1"),
        ({"timeout_s": 0}, "timeout_s must be above 0"),
        ({"weight": True}, "weight must be a number"),
        ({"weight": 10**400}, "weight must be a number"),
        ({"batched": "no"}, "batched must be True or False"),
    ],
)
def test_a_decorator_refuses_what_cannot_work(options: dict[str, Any], words: str) -> None:
    assert re.search(f"^odd: {words}", refused(lambda: decorate(**options)))


def decorate(**options: Any) -> RewardFunction:
    @reward(**options)
    def odd(example: Example, text: str) -> float:
        return 0.0

    return odd


HEAD = "from minigrpo import reward\nfrom minigrpo.types import Example\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        attack(
            "16 lambdas", "a, b = (reward()(lambda e, t: 0.0) for _ in 'ab')", "use def instead"
        ),
        attack(
            "16 functions",
            "@reward()\ndef f(e, t): return 0.0\ng = f\n@reward()\ndef f(e, t): return 1.0",
            "--rewards: two functions are named f",
        ),
        attack("15", "@reward()\ndef step(e, t): return 0.0", "must not be named step, because"),
        ("@reward()\ndef exact(e, t): return 0.0", "must not be named exact"),
        ("@reward()\nasync def f(e, t): return 0.0", "f: must be a plain function, not async"),
        (
            "@reward()\n@reward(weight=0.5)\ndef f(e, t): return 0.0",
            "f: is decorated with @reward twice",
        ),
        ("@reward()\ndef f(e, t): yield 0.0", "f: must return its scores, not yield them"),
        ("@reward()\nasync def f(e, t): yield 0.0", "f: must be a plain function, not async"),
        ("@reward()\ndef num_nonfinite(e, t): return 0.0", "must not be named num_nonfinite"),
        ("@reward()\ndef f(text): return 0.0", "must be a function that takes .example, text"),
        ("@reward(batched=True)\ndef f(): return 0.0", "that takes .examples, texts"),
        ("@reward\ndef f(e, t): return 0.0", "TypeError: reward.. takes 0 positional"),
        ("class E(BaseException): pass\nraise E", "--rewards .*: E$"),
        ("raise ValueError('one\\n\\ntwo')", "ValueError: one two$"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("x = " + "(" * 5000, "SyntaxError|MemoryError"),
    ],
)
def test_a_reward_file_is_refused_by_name(tmp_path: Path, code: str, words: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HEAD + code)
    message = refused(lambda: RewardScorer(Recorder(), functions=load_rewards(str(path))))  # type: ignore[arg-type]
    assert message.startswith("--rewards")
    assert re.search(words, message), message


def test_one_function_under_two_names_is_one_part(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HEAD + "@reward()\ndef f(e, t): return 0.0\ng = f")
    assert [f.name for f in load_rewards(str(tmp_path / "mine.py"))] == ["f"]


@pytest.mark.parametrize("workers", [attack("36", 100_000), 257])
def test_the_number_of_reward_threads_is_limited(workers: int) -> None:
    message = refused(lambda: Config.of(num_reward_workers=workers))
    assert message == f"--num-reward-workers must be at least 1 and at most 256, got {workers}"


def test_a_system_without_threads_left_scores_in_those_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, started = threading.Thread.start, list[int]()

    def start(thread: threading.Thread) -> None:
        started.append(1)
        if len(started) > 1:
            raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    pool = WorkerPool(8, "test")
    jobs = [pool.submit(pow, 2, n) for n in range(5)]
    assert [pool.wait(job, None) for job in jobs] == [1, 2, 4, 8, 16]
    pool.close()


@pytest.mark.parametrize("value", [1e30, float("inf"), -1e13, 10**400])
def test_a_score_whose_variance_overflows_counts_as_failed(value: float) -> None:
    @reward()
    def huge(example: Example, text: str) -> float:
        return value

    scorer = RewardScorer(Recorder(), functions=[huge])  # type: ignore[arg-type]
    table = scorer.score([Example("a", "b")], [["b"]])
    assert table.failures["huge"] == 1 and np.isfinite(table.total).all()
    with pytest.raises(ConfigError, match="--reward-weights: right must be a number from -1e"):
        RewardScorer(Recorder(), weights={"right": value})  # type: ignore[arg-type]


def test_large_scores_keep_their_differences() -> None:
    @reward()
    def late(example: Example, text: str) -> float:
        return 1.7e9 + len(text)

    scorer = RewardScorer(Recorder(), functions=[late])  # type: ignore[arg-type]
    table = scorer.score([Example("a", "b")], [["b", "cc", "ddd"]])
    assert table.total.tolist() == [[1.7e9 + 2, 1.7e9 + 2, 1.7e9 + 3]]
    assert table.parts["right"].dtype == np.float32


@pytest.mark.filterwarnings("error")
def test_the_largest_weights_give_a_finite_spread_without_a_warning() -> None:
    @reward(weight=1e12)
    def huge(example: Example, text: str) -> float:
        return 1e12 / len(text)

    scorer = RewardScorer(Recorder(), functions=[huge])  # type: ignore[arg-type]
    table = scorer.score([Example("a", "b")], [["b", "cc", "ddd"]])
    assert np.isfinite(table.total.std(axis=1, ddof=1)).all()


def test_small_totals_are_summed_in_float32_as_they_are() -> None:
    parts = {"a": np.float32([[0.1, 0.7]]), "b": np.float32([[0.3, 0.9]])}
    total = weighted_sum(parts, {"a": 0.3, "b": 0.7})
    expected = np.float32(0.3) * parts["a"] + np.float32(0.7) * parts["b"]
    assert total.dtype == np.float32 and total.tobytes() == expected.tobytes()


ONE = [Example("a", "b")]


@pytest.mark.parametrize(
    ("examples", "texts", "words"),
    [
        attack("9", ONE, ["26"], "texts must be lists of texts, one per example, got str '26'"),
        attack("9 bytes", ONE, [[b"26"]], "a completion must be text, got bytes"),
        attack("9 None", ONE, [["26", None]], "a completion must be text, got NoneType"),
        (ONE, None, "texts must be a list, got NoneType"),
        (ONE, "26", "texts must be a list, got str"),
        attack("27", [], [], "texts must have a list of completions for each example"),
        attack("27 ragged", ONE * 2, [["a", "b"], ["c"]], "the same number of texts.* got 2 and 1"),
        (ONE, [[]], "the same number of texts, at least one, got 0 and 0"),
        (ONE, [["a"], ["b"]], "got 2 for 1 examples"),
    ],
)
def test_texts_of_another_shape_are_refused(examples: Any, texts: Any, words: str) -> None:
    scorer = RewardScorer(Recorder())  # type: ignore[arg-type]
    assert re.search(words, refused(lambda: scorer.score(examples, texts)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        attack("10", {"timeout_s": "1"}, "timeout_s must be a number"),
        attack("10 zero", {"timeout_s": 0}, "timeout_s must be above 0, got 0"),
        attack("10 negative", {"timeout_s": -1}, "timeout_s must be above 0, got -1"),
        attack("27", {"functions": [len]}, "functions must be decorated with @minigrpo.reward"),
        ({"workers": -1}, "workers must be a whole number of at least 0, got -1"),
        ({"workers": 2.5}, "workers must be a whole number of at least 0, got 2.5"),
    ],
)
def test_a_scorer_refuses_what_cannot_work(options: dict[str, Any], words: str) -> None:
    assert words in refused(lambda: RewardScorer(Recorder(), **options))  # type: ignore[arg-type]


def test_a_class_is_no_task() -> None:
    """Every call failed, and all rewards were the floor."""
    assert "must be an object, got the class Recorder" in refused(lambda: RewardScorer(Recorder))  # type: ignore[arg-type]


def test_no_weights_are_those_of_the_task() -> None:
    for none in (None, {}):
        assert RewardScorer(Recorder(), weights=none).weights == {"right": 1.0}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "column",
    [
        attack("12 masked", np.ma.masked_array([1.0, 2.0], mask=True)),
        attack("18 shape", np.ones((2, 1))),
        attack("18 list", [10**400, 1]),
        attack("18 fraction", [Fraction(10**400), 1]),
        attack("18 dict", {0: 1.0, 1: 2.0}),
        {0.5, 1.0},
        b"ab",
        ["1", "2"],
        [[1.0], [2.0]],
        np.array([1.0, None]),
        [True, math.nan],
    ],
)
def test_an_answer_that_is_no_row_of_numbers_is_a_bad_reward(column: Any) -> None:
    source = RewardSource(["a"], len, kind="batched", timeout_s=None)
    with pytest.raises(BadRewardError, match="not (2 numbers|a finite number)"):
        source.check({"a": column}, 2)
    assert source.check({"a": [Fraction(1, 2), np.float16(2)]}, 2).tolist() == [[0.5, 2.0]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        attack("13", {"seed": None}, "seed must be a whole number of at least 0, got None"),
        attack("13 size", {"size": 0}, "size must be a whole number of at least 1, got 0"),
        attack("13 scorer", {"task": Counter()}, "scorer must be made for the task"),
    ],
)
def test_an_evaluation_that_would_mislead_is_refused(changes: dict[str, Any], words: str) -> None:
    task, sampler = Recorder(), None
    given: dict[str, Any] = {"task": task, "size": 4, "seed": 0, **changes}
    scorer = RewardScorer(task)  # type: ignore[arg-type]
    assert words in refused(lambda: evaluate(sampler, scorer=scorer, **given))  # type: ignore[arg-type]


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["task", "rewards", "data", "init_from"])
@pytest.mark.parametrize(
    ("name", "words"), [attack("16", "x" * 300, "too long"), attack("17", "loop", "symbolic links")]
)
def test_a_path_that_cannot_be_looked_up_is_one_line(
    tmp_path: Path, flag: str, name: str, words: str
) -> None:
    path = tmp_path / f"{name}{'.pgn' if flag == 'data' else '.py'}"
    if len(name) < 255:
        path.symlink_to(path)
    message = refused(lambda: start(tmp_path, **{flag: str(path)}))
    assert message.startswith(f"--{flag.replace('_', '-')} {str(path)[:150]}")
    assert "cannot be read" in message and words in message


PGN = SMALL.read_text("utf-8")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        attack(
            "28 gzip", gzip.compress(PGN.encode()), "is compressed with gzip, and must be named"
        ),
        attack("28 UTF-16", PGN.encode("utf-16"), "is UTF-16 text; convert it to UTF-8"),
        (PGN.encode("utf-16-le"), "is UTF-16 text; convert it to UTF-8"),
        (b"PK\x03\x04rest", "is compressed with zip; unpack it first"),
    ],
)
def test_a_game_file_of_another_kind_says_what_it_is(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "games.pgn"
    path.write_bytes(content)
    message = refused(lambda: load_task("chess-env", seed=0, data=str(path)))
    assert message.startswith(f"--data {path}: {words}")


@pytest.mark.parametrize("nag", [attack("25", "9" * 5000)])
def test_a_game_that_cannot_be_parsed_is_skipped_and_counted(tmp_path: Path, nag: str) -> None:
    path, heard = tmp_path / "games.pgn", Heard()
    path.write_text(f'{PGN}\n\n[Event "bad"]\n\n1. e4 ${nag} e5 *\n\n[Event "good"]\n\n1. e4 *\n')
    games = Games(path, seed=0, listener=heard)
    assert "skipped 6 of 13 games" in heard.warnings[0]
    assert games.num_train == Games(SMALL, seed=0).num_train + 1


@pytest.mark.parametrize("history", [attack("28", 1024)])
def test_a_history_that_does_not_fit_blames_the_file_it_is_for(
    tmp_path: Path, history: int
) -> None:
    message = refused(lambda: start(tmp_path, data=str(SMALL), history=history, max_new_tokens=240))
    assert message.startswith(f"--data {SMALL}: ")


@pytest.mark.parametrize("part", [attack("15", "exact=5,similarity"), "a,b"])
def test_the_weights_of_a_file_name_one_part_each(tmp_path: Path, part: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'[task.reward_weights]\n"{part}" = 1\n')
    message = refused(lambda: Config.from_toml(path))
    assert message.startswith(f"--config {path}: [reward_weights] names one part per line")


@pytest.mark.parametrize(("seed", "same"), [attack("11", 2**32 + 5, False), (2**32 - 1, True)])
def test_a_large_seed_has_weights_of_its_own(seed: int, same: bool) -> None:
    low, found = seed % 2**32, weights_seed(seed)
    assert (found == low) is same and weights_seed(2**33 + 5) != weights_seed(2**32 + 5)
    config = Config.of(**{**NULL, "init_from": "scratch", "seed": seed})
    model = make_model(config, load_tokenizer("chess"))
    expected = Transformer(model.shape, seed=low).wte.weight
    assert bool((model.wte.weight == expected).all()) is same


def test_numbers_of_numpy_are_settings() -> None:
    config = Config.of(learning_rate=np.float64(0.5), clip_low=np.float32(0.25), seed=np.int64(3))
    assert config == Config.of(learning_rate=0.5, clip_low=0.25, seed=3)
    values = config.optimizer.learning_rate, config.loss.clip_low, config.run.seed
    assert [type(x) for x in values] == [float, float, int]


@pytest.mark.parametrize("setting", [attack("29", 'data = "games.pgn"'), 'rewards = "mine.py"'])
def test_a_tool_says_where_the_paths_of_a_run_begin(tmp_path: Path, setting: str) -> None:
    (tmp_path / "config.toml").write_text(f"[task]\n{setting}\n[versions]\n")
    message = refused(lambda: load(ModelSelection(tmp_path), Screen()))
    assert "not found; the paths of a run are relative to the folder where training" in message


CHANGES = {
    "torch's default dtype": "torch.set_default_dtype(torch.float64)",
    "torch's default device": "torch.set_default_device('meta')",
    "torch's gradients": "torch.set_grad_enabled(False)",
    "torch's number of threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "torch's deterministic algorithms": "torch.use_deterministic_algorithms(True)",
    "torch's autocast on cpu": "torch.set_autocast_enabled('cpu', True)",
    "torch's autocast on cuda": "torch.set_autocast_dtype('cuda', torch.bfloat16)",
    "torch's matmul precision": "torch.set_float32_matmul_precision('medium')",
    "torch's anomaly detection": "torch.autograd.set_detect_anomaly(True)",
    "numpy's handling of errors": "numpy.seterr(all='raise')",
    "Python's recursion limit": "sys.setrecursionlimit(500)",
    "the current folder": "os.chdir('/')",
}


@pytest.mark.parametrize("flag", ["--task", "--rewards"])
def test_what_a_file_does_to_the_process_is_undone_with_one_warning(
    tmp_path: Path, flag: str
) -> None:
    before = {name: read() for name, (read, _) in STATE.items()}
    path, said = own(tmp_path), list[str]()
    code = "import os, sys, numpy, torch\n" + "\n".join(CHANGES.values()) + "\n"
    if flag == "--task":
        path.write_text(code + path.read_text())
        load_own_task(str(path), 0, said.append)
    else:
        path.write_text(f"{HEAD}{code}@reward()\ndef f(e, t): return 0.0\n")
        load_rewards(str(path), said.append)
    assert {name: read() for name, (read, _) in STATE.items()} == before
    assert len(said) == 1
    assert said[0].startswith(f"{flag} {path}: changes {', '.join(STATE)} for the whole run")
    path.write_text(code + "1 // 0")
    for read_it in (lambda: load_own_task(str(path), 0), lambda: load_rewards(str(path))):
        assert refused(read_it).endswith("ZeroDivisionError: integer division or modulo by zero")
    assert {name: read() for name, (read, _) in STATE.items()} == before


def test_the_warning_of_a_file_that_changes_the_process_reaches_the_screen(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = own(tmp_path, (PARTS, PARTS))
    code = "import torch\ntorch.set_default_dtype(torch.float64)\n"
    path.write_text(code + path.read_text())
    (tmp_path / "r.py").write_text(f"{HEAD}{code}@reward()\ndef f(e, t): return 0.0\n")
    trainer = start(tmp_path, task=str(path), rewards=str(tmp_path / "r.py"))
    assert capfd.readouterr().err.count("changes torch's default dtype for the whole run") == 2
    assert {x.dtype.itemsize for x in trainer.model.parameters()} == {4}


# --- tasks of one's own ---------------------------------------------------------------------------

OWN = """
from minigrpo.types import Example

class Mine:
    parts = {"right": 1.0}
    def __init__(self, seed):
        self.items = [Example(f"q{i}", str(i)) for i in range(5)]
    def train(self, number):
        return Example(f"t{number}", str(number))
    def held_out(self, number):
        return Example(f"h{number}", str(number))
    def score(self, example, text):
        return {name: float(text == example.answer) for name in self.parts}
"""


def own(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """A file with a task, in which some text is replaced."""
    code = OWN
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    path = tmp_path / "mine.py"
    path.write_text(code)
    return path


PARTS, TRAIN = '{"right": 1.0}', 'Example(f"t{number}", str(number))'
HELD_OUT, SCORE = 'Example(f"h{number}", str(number))', "return {name:"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        attack("15 step", PARTS, '{"step": 1.0}', "must not be named step"),
        attack("15 n", PARTS, '{"n": 1.0}', "must not be named n,"),
        attack(
            "15 exact_sampled", PARTS, '{"exact_sampled": 1}', "must not be named exact_sampled"
        ),
        attack("17 parts", PARTS, "{}", "parts must be a dict of at least one name and weight"),
        attack("17 nan", PARTS, '{"a": float("nan")}', "the weight of part a must be a number"),
        attack("30 parts list", PARTS, '["a"]', "parts must be a dict"),
        attack("30 parts None", PARTS, "None", "parts must be a dict"),
        attack("30 int name", PARTS, "{1: 1.0}", "the name of a reward part must be text, got int"),
        attack("30 weight", PARTS, '{"a": "high"}', "the weight of part a must be a number"),
        attack(
            "30 num text", PARTS, f'{PARTS}; num_held_out = "many"', "num_held_out must be a wh"
        ),
        attack("30 num -3", PARTS, f"{PARTS}; num_held_out = -3", "num_held_out must be a whole"),
        attack(
            "30 prompt int", TRAIN, "Example(3, '')", r"train\(0\): prompt must be text, got int"
        ),
        attack("30 prompt bytes", TRAIN, "Example(b'a', '')", r"train\(0\): prompt must be text"),
        attack(
            "30 answer", TRAIN, "Example('a', None)", r"train\(0\): answer must be text, got No"
        ),
        attack("30 kind", TRAIN, "Example('a', '', 0, None)", r"train\(0\): kind must be text"),
        attack("30 index i", TRAIN, "Example('a', '', 'i')", r"train\(0\): index must be a whole"),
        attack("30 index -5", TRAIN, "Example('a', '', -5)", "index must be a whole number from 0"),
        attack("30 index 2**70", TRAIN, "Example('a', '', 2**70)", "index must be a whole number"),
        attack(
            "30 no num", HELD_OUT, "self.items[number]", r"held_out\(5\): IndexError: list .*; "
        ),
        attack("31 raises", TRAIN, f"1 // (number != 3) and {TRAIN}", r"train\(3\): ZeroDivisionE"),
        attack("31 None", TRAIN, f"{TRAIN} if number != 3 else None", r"train\(3\): must return a"),
        attack(
            "40", TRAIN, "Example('\\ud800', '')", r"train\(0\): prompt has half of a surrogate"
        ),
        attack(
            "44", "self.items", "raise ValueError('a\\nb\\nc')\n        x", "ValueError: a b c$"
        ),
        (TRAIN, "Example('', '')", r"train\(0\): the prompt is empty"),
        (TRAIN, "Example('a' * 10**6, '')", r"train\(0\): the prompt has at least 100000 tokens"),
        (TRAIN, "Example('a', '', 0, 'all')", "kind must not be 'all'"),
        (TRAIN, "exit()", r"train\(0\): SystemExit"),
        ("(self, seed)", "(self)", r"Mine: TypeError: .*__init__.. takes 1 positional"),
        (PARTS, "property(lambda self: 1 // 0)", "Mine: ZeroDivisionError"),
        (PARTS, f"{PARTS}; num_held_out = True", "num_held_out must be a whole number"),
        (PARTS, '{"a,b": 1}', "printable text without ,=/"),
        (PARTS, '{"exact/a": 1}', "printable text without ,=/"),
        (PARTS, '{" ": 1}', "printable text without ,=/"),
        (HELD_OUT, f"{HELD_OUT} if number < 200 else None", r"held_out\(200\): must return"),
        (SCORE, "return 1 // 0 #", r"score of train\(0\) and the text '0': ZeroDivisionError"),
        (SCORE, "return None #", "score of .*: returned NoneType 'None', without right"),
        (SCORE, "import time; time.sleep(9) #", "took longer than 0.05 s"),
        ("def score", "score_batch = 3\n    def score", "Mine: score_batch of 2 texts: TypeError"),
        (
            "def score",
            "score_batch = lambda self, e, t: {'right': __import__('numpy').ones((1, 1))}\n"
            "    def score",
            "score of .*, not 2 numbers",
        ),
        ("def score", "score_batch = lambda *a: {}\n    def score", "score of .*, without right"),
    ],
)
def test_a_task_of_ones_own_is_refused_by_name(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    path = own(tmp_path, (old, new))
    message = refused(lambda: start(tmp_path, task=str(path), reward_timeout=0.05))
    assert message.startswith(f"--task {path}: Mine: ")
    assert re.search(words, message), message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("name", "is_refused"), [attack("15 exact", "exact", True), ("ok", False)])
def test_a_part_named_exact_means_the_true_answer(
    tmp_path: Path, name: str, is_refused: bool
) -> None:
    """`exact` in eval.jsonl is the share of completions that equal it."""
    score = "float(text == example.answer)", "float(text.strip() == example.answer)"
    path = str(own(tmp_path, (PARTS, f'{{"{name}": 1.0}}'), score))
    if is_refused:
        assert "the part exact must be 1 for" in refused(lambda: start(tmp_path, task=path))
    else:
        start(tmp_path, task=path)


@pytest.mark.parametrize("number", [attack("31", 700)])
def test_an_example_that_fails_later_is_one_line_too(tmp_path: Path, number: int) -> None:
    path = own(tmp_path, (TRAIN, f"1 // (number != {number}) and {TRAIN}"))
    trainer = start(tmp_path, task=str(path), prompts_per_step=4)
    message = refused(lambda: trainer.task.train(number))
    assert message.startswith(f"--task {path}: Mine: train(700): ZeroDivisionError")


@pytest.mark.parametrize(
    ("text", "loss", "words"),
    [
        (TRAIN, "nll", r"train\(601\): the answer has 300 tokens; at most 251 fit .* prompt's 4"),
        (TRAIN, "grpo", r"train\(601\): the prompt has 300 tokens; at most 250 leave room"),
        (HELD_OUT, "grpo", r"held_out\(601\): the prompt has 300 tokens; at most 250 leave room"),
    ],
)
def test_a_late_text_that_is_too_long_names_the_file_and_the_call(
    tmp_path: Path, text: str, loss: str, words: str
) -> None:
    """Number 601 is beyond those that are checked before the run starts."""
    prompt, answer = ("f't{number}'", "'x' * 300") if loss == "nll" else ("'x' * 300", "''")
    change = text, f"Example({prompt}, {answer}) if number == 601 else {text}"
    path = own(tmp_path, change)
    trainer = start(tmp_path, task=str(path), loss=loss, prompts_per_step=4, max_steps=400)
    if text == TRAIN:
        message = refused(lambda: trainer.source.batch(150))
    else:
        examples = [trainer.task.held_out(number) for number in (600, 601)]
        message = refused(lambda: next(trainer.sampler.complete(examples)))
    assert message.startswith(f"--task {path}: Mine: ") and re.search(words, message), message


def test_a_long_prompt_and_a_long_answer_of_different_examples_are_no_error(tmp_path: Path) -> None:
    """The estimate took the longest answer off the room of each prompt."""
    long = "Example('p' * 240 if number % 2 else 'h', '' if number % 2 else 'a' * 240)"
    path = own(tmp_path, (HELD_OUT, long))
    start(tmp_path, task=str(path), loss="nll")


def test_an_error_in_score_batch_names_the_call(tmp_path: Path) -> None:
    fails = "def score_batch(self, examples, texts):\n        raise KeyError('x')\n    def score"
    task = load_own_task(str(own(tmp_path, ("def score", fails))), 0)
    message = refused(lambda: RewardScorer(task).score([task.train(0)], [["a"]]))
    assert message.endswith("mine.py: Mine: score_batch of 1 texts: KeyError: 'x'")


@pytest.mark.parametrize("where", ["train", "score_batch"])
def test_an_interrupt_that_a_task_raises_itself_is_one_line_that_names_the_call(
    tmp_path: Path, where: str
) -> None:
    """Ctrl-C arrives in the main thread, and a task's calls are in others."""
    fails = (
        "def score_batch(self, examples, texts):\n        raise KeyboardInterrupt('x')\n    def s"
    )
    raises = f"(_ for _ in ()).throw(KeyboardInterrupt('x')) if number == 9 else {TRAIN}"
    fails = "def score_batch(self, *a):\n        raise KeyboardInterrupt('x')\n    def score"
    change = (TRAIN, raises) if where == "train" else ("def score", fails)
    task: Any = load_own_task(str(own(tmp_path, change)), 0)
    pool = WorkerPool(1, "test")
    call = (task.train, 9) if where == "train" else (task.score_batch, [Example("a", "b")], ["c"])
    message = refused(lambda: pool.wait(pool.submit(*call), None))
    pool.close()
    name = "train(9)" if where == "train" else "score_batch of 1 texts"
    assert message.endswith(f"mine.py: Mine: {name}: KeyboardInterrupt: x")


def test_what_a_task_of_ones_own_says_of_itself_is_kept(tmp_path: Path) -> None:
    """`judged_by` was dropped, so a resume with other software that judges said nothing."""
    said = 'class Mine:\n    about = "sums"\n    judged_by = "rules 2"'
    task: Any = load_own_task(str(own(tmp_path, ("class Mine:", said))), 0)
    asked: Any = with_confidence(task, seed=0, chat=False, supervised=False)
    for one in (task, asked):
        assert (one.about, one.judged_by) == ("sums", "rules 2")
    with pytest.raises(ConfigError, match="judged_by must be text, got int '3'"):
        load_own_task(str(own(tmp_path, ("class Mine:", "class Mine:\n    judged_by = 3"))), 0)


def test_each_prompt_of_ones_own_has_its_own_random_numbers(tmp_path: Path) -> None:
    """The task does not set `index`; its code gets its own object back."""
    task = load_own_task(str(own(tmp_path)), 0)
    assert [task.train(i).index for i in range(3)] == [0, 1, 2]
    assert [task.held_out(i).index for i in range(3)] == [0, 1, 2]
    keyed = own(tmp_path, (TRAIN, 'Example(f"t{number}", str(number), index=99)'))
    keyed.write_text(keyed.read_text() + "        assert type(example) is Example\n")
    code = keyed.read_text().replace("        return {name", "        return {str(example.index)")
    keyed.write_text(code.replace('"right"', '"99"'))
    task = load_own_task(str(keyed), 0)
    assert task.train(5).index == 5 and task.score(task.train(5), "5") == {"99": 1.0}
    table = RewardScorer(task).score([task.train(5)], [["5", "6"]])
    assert table.parts["99"].tolist() == [[1, 0]] and not table.failures["99"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (TRAIN, HELD_OUT, "256 of 256 evaluation prompts are also training prompts"),
        (TRAIN, HELD_OUT.replace("}", "} "), "256 of 256 evaluation prompts are also training"),
        (HELD_OUT, 'Example(f"h{number % 9}", "0")', "9 of 256 evaluation examples differ"),
        (
            TRAIN,
            "Example(str(id(object())) + str(__import__('time').time()), '')",
            "train(0) gives",
        ),
    ],
)
def test_a_doubtful_task_is_warned_of(
    tmp_path: Path, old: str, new: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path, task=str(own(tmp_path, (old, new))))
    assert words in capfd.readouterr().err


def test_a_good_task_is_not_warned_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    few = (PARTS, f"{PARTS}; num_held_out = 5"), (HELD_OUT, "self.items[number]")
    start(tmp_path, task=str(own(tmp_path, *few)))
    assert capfd.readouterr().err == "" and time.monotonic() - begin < 30


# --- model files ----------------------------------------------------------------------------------


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    shape = ModelShape(267, context=16, layers=1, width=8, heads=2)
    export_model(Transformer(shape, seed=0).state_dict(), tmp_path / "m", shape=shape, eos=266)
    return tmp_path / "m"


@pytest.mark.parametrize("value", [attack("18", float("nan")), float("inf"), 1e300])
def test_weights_that_are_not_finite_are_refused_by_the_tensors_name(
    exported: Path, value: float
) -> None:
    file = exported / "model.safetensors"
    state = {name: x.double() for name, x in load_file(file).items()}
    state["h.0.mlp.c_fc.weight"][3, 2] = value
    save_file(state, file)
    message = refused(lambda: Transformer.from_pretrained(str(exported)))
    assert message.endswith("h.0.mlp.c_fc.weight has 1 values that are not finite in float32")


@pytest.mark.parametrize(
    "content", [attack("25 config.json", DEEP), "[]", "{", '{"n_head": 1, "n_head": 2}', "\xff"]
)
def test_a_damaged_config_json_is_named(exported: Path, content: str) -> None:
    (exported / "config.json").write_bytes(content.encode("latin-1"))
    message = refused(lambda: Transformer.from_pretrained(str(exported)))
    assert message.startswith(f"{exported / 'config.json'}: cannot be read (")


def test_a_byte_order_mark_in_config_json_is_read_over(exported: Path) -> None:
    file = exported / "config.json"
    file.write_text(file.read_text(), encoding="utf-8-sig")
    assert Transformer.from_pretrained(str(exported)).shape.heads == 2


@pytest.mark.parametrize("content", [attack("25 vocab.json", DEEP), "[1]", '{"a": "b"}', ""])
def test_a_damaged_vocabulary_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "vocab.json").write_text(content)
    (tmp_path / "merges.txt").write_text("#version\n")
    message = refused(lambda: load_tokenizer(str(tmp_path)))
    assert message.startswith(f"--tokenizer {tmp_path}: the vocabulary is not")


def test_the_weights_in_force_are_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {**NULL, "out_dir": str(tmp_path / "run"), "reward_weights": "valid=2,format=-0.5"}
    Trainer(Config.of(**{**settings, "stop_after": 1, "eval_size": 1})).fit()
    assert "reward: 2 x valid + -0.5 x format\n" in capfd.readouterr().out
