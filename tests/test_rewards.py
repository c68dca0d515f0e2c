"""Reward functions: the table they make, what fails and what that costs, and who is trusted."""

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minigrpo.metrics import Graded
from minigrpo.rewards.functions import RewardFunction, as_scores, load_rewards, reward, similarity
from minigrpo.rewards.scorer import RewardScorer, settled
from minigrpo.run.logging import read_jsonl
from minigrpo.runtime.calls import STOP_SIGNALS, Pool, event_loop
from minigrpo.task import Task, TokenBatch
from minigrpo.tasks.loading import load_task
from minigrpo.text.encoding import to_completions
from minigrpo.text.tokenizer import load_tokenizer
from minigrpo.types import Example, RewardTable

from .steps import group
from .tiny import ROOT, descendants, is_running, refused, wait_until

EXAMPLES = [Example("1+1=", "2", 0), Example("2+2=", "4", 1)]
TEXTS = [group("good", "bad", "good"), group("bad", "good", "worse")]


class Lengths(Task):
    """A task whose parts are the length of a text, and whether it is the answer."""

    reward_weights: Mapping[str, float] = {"length": 1.0, "right": 2.0}
    success = "right"

    def __init__(self) -> None:
        self.calls = []

    def score(self, example: Example, text: str) -> Mapping[str, float]:
        self.calls.append(text)
        return {"length": float(len(text)), "right": float(text == example.answer)}


def score(function: RewardFunction, workers: int = 2) -> tuple[list[list[float]], int, list[str]]:
    """A function's values for TEXTS, how often it failed, and the warnings."""
    warnings = []
    scorer = RewardScorer(Lengths(), functions=[function], workers=workers, warn=warnings.append)
    table = scorer.score(EXAMPLES, TEXTS)
    # the others keep their values
    assert table.scores["length"].values.tolist() == [[4, 3, 4], [3, 4, 5]]
    scores = table.scores[function.name]
    return scores.values.tolist(), scores.failed.sum(), warnings


@given(st.text(alphabet="KQrbn12/ +w-", min_size=1, max_size=30), st.data())
def test_similarity_falls_with_each_wrong_character(truth: str, data: st.DataObject) -> None:
    """A character that does not occur in the truth costs exactly one edit."""
    wrong = data.draw(st.sets(st.integers(0, len(truth) - 1)))
    text = "".join("x" if place in wrong else char for place, char in enumerate(truth))
    assert similarity(text, truth) == pytest.approx(1 - len(wrong) / len(truth))
    added = data.draw(st.integers(0, 30))
    expected = len(truth) / (len(truth) + added)
    assert similarity("x" * added + truth, truth) == pytest.approx(expected)
    assert similarity("", "") == 1
    assert similarity("", truth) == 0


@pytest.mark.parametrize("workers", [1, 3])
def test_the_table_is_that_of_the_naive_loop(workers: int) -> None:
    @reward(weight=0.5)
    def vowels(example: Example, text: str) -> int:
        time.sleep(0.01 if text == "good" else 0)  # the others are ready first
        return sum(x in "aeiou" for x in text)

    scorer = RewardScorer(Lengths(), functions=[vowels], workers=workers)
    table = scorer.score(EXAMPLES, TEXTS)
    for p, g in np.ndindex(2, 3):
        text = TEXTS[p][g]
        naive = {**Lengths().score(EXAMPLES[p], text), "vowels": sum(x in "aeiou" for x in text)}
        assert {name: scores.values[p, g] for name, scores in table.scores.items()} == naive
        total = naive["length"] + 2 * naive["right"] + 0.5 * naive["vowels"]
        assert table.total[p, g] == total
    assert list(table.scores) == ["length", "right", "vowels"]
    assert table.total_known.all()
    for scores in table.scores.values():
        assert scores.known.all()
        assert not scores.failed.any()


def test_each_distinct_text_of_an_example_is_scored_once() -> None:
    task, seen = Lengths(), []

    @reward(batched=True)
    def batched(examples: Sequence[Example], texts: Sequence[str]) -> list[float]:
        seen.append(list(zip([example.answer for example in examples], texts, strict=True)))
        return [0.0] * len(texts)

    RewardScorer(task, functions=[batched]).score(EXAMPLES, TEXTS)
    assert task.calls == ["good", "bad", "bad", "good", "worse"]
    assert seen == [[("2", "good"), ("2", "bad"), ("4", "bad"), ("4", "good"), ("4", "worse")]]
    twins = [Example("?", "a"), Example("?", "b")]  # one prompt and two answers are two
    table = RewardScorer(Lengths()).score(twins, [group("a"), group("a")])
    assert table.scores["right"].values.tolist() == [[1], [0]]


def test_weights_choose_and_scale() -> None:
    double = RewardScorer(Lengths(), weights={"length": 2.0}).score(EXAMPLES, TEXTS)
    assert np.array_equal(double.total, 2 * double.scores["length"].values)
    assert double.scores["right"].values.shape == (2, 3)  # measured, and not paid


def test_names_and_choices_that_cannot_be_are_refused() -> None:
    def scorer(names: Sequence[str], weights: Any = None) -> RewardScorer:
        functions = [reward(lambda example, text: 1.0, name=name) for name in names]
        return RewardScorer(Lengths(), functions=functions, weights=weights)

    for names in (["length"], ["step"], ["pass@1"], ["a/b"]):
        refused(scorer, names)
    refused(scorer, ["mine"], {"typo": 1.0})
    assert score(reward(lambda example, text: 1.0, timeout_s=np.float32(5)))[1] == 0
    task = Lengths()
    task.success = "lenght"  # the headline would be another measure, under this name
    refused(RewardScorer, task)
    refused(reward, lambda examples, texts: [], batched=True, grouped=True)
    both = [reward(lambda example, text: 1.0, name=name, success=True) for name in ("f", "g")]
    refused(RewardScorer, Lengths(), functions=both)  # one of them would say nothing


def test_functions_without_a_name_have_one() -> None:
    class Judge:
        def __call__(self, example: Example, text: str) -> float:
            return 4.0

    def near(example: Example, text: str, scale: float = 1.0) -> float:
        return scale

    given = [partial(near, scale=2), Judge(), lambda a, b: 5.0]
    functions = [*map(reward, given), reward(near, name="reward")]
    table = RewardScorer(Lengths(), functions=functions).score(EXAMPLES, TEXTS)
    found = {name: scores.values[0, 0] for name, scores in table.scores.items()}
    # `reward` is the weighted sum
    expected = {"near": 2, "Judge": 4, "function": 5, "reward_function": 1}
    assert found.items() >= expected.items()
    refused(RewardScorer, Lengths(), functions=[reward(near), reward(near)])
    refused(RewardScorer, Lengths(), functions=[reward(near, name="near_sampled")])


def test_a_dialogue_that_broke_off_fails_in_every_reward_that_concerns_it() -> None:
    length = reward(lambda example, text: len(text), name="length")
    silent = reward(lambda example, text: None, name="silent")
    scorer = RewardScorer(Task(), functions=[length, silent], environments={"Game": 1.0})
    first, second, broken = group("a", "bb", "the longest")
    first.rewards, second.rewards = {"Game": 2.0}, {"Game": 3.0}
    broken.rewards, broken.error = {"Game": math.nan}, "gone"
    table = scorer.score(EXAMPLES[:1], [[first, second, broken]])
    assert table.total.tolist() == [[3, 5, 3]]
    failed = {name: scores.failed[0].tolist() for name, scores in table.scores.items()}
    assert failed["Game"] == failed["length"] == [False, False, True]
    assert not any(failed["silent"])


def test_async_functions_run_side_by_side() -> None:
    inside = []

    async def slow(example: Example, text: str) -> float:
        inside.append(text)
        while len(inside) < 5:  # all distinct texts are in the function at once
            await asyncio.sleep(0.001)
        if text == "bad":
            await asyncio.sleep(60)
        return len(text)

    values, failures, _ = score(reward(slow, timeout_s=2.0), workers=1)
    assert (values, failures) == ([[4, 4, 4], [4, 4, 5]], 2)


def test_the_first_calls_of_many_threads_share_a_loop() -> None:
    event_loop.cache_clear()
    loops = set()

    @reward
    async def noted(example: Example, text: str) -> float:
        loops.add(asyncio.get_running_loop())
        return 0.0

    texts = group(*map(str, range(64)))
    RewardScorer(Task(), functions=[noted]).score(EXAMPLES[:1], [texts])
    assert len(loops) == 1


def test_calls_that_have_not_begun_end_with_their_pool() -> None:
    hold = threading.Event()
    pool = Pool(1)
    for number in range(3):
        pool.submit(number, hold.wait, 60)
    wait_until(lambda: pool.deadlines)
    pool.close()
    hold.set()
    assert [outcome.key for outcome in pool.all()] == [0]


def test_a_file_gives_its_decorated_functions(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("""
from minigrpo import reward
helper = lambda text: 2.0
@reward
def one(example, text): return 1.0
@reward(weight=0.5, batched=True)
def two(examples, texts): return [helper(text) for text in texts]
""")
    found = load_rewards(str(path))
    assert [(f.name, f.weight, f.batched) for f in found] == [("one", 1, False), ("two", 0.5, True)]
    assert found[1](EXAMPLES, ["a"]) == [2.0]
    (tmp_path / "empty.py").write_text("x = 1")
    refused(load_rewards, str(tmp_path / "empty.py"))


NO_NUMBERS = [float("nan"), float("inf"), [1.0], 1j, {}, np.array([1.0, 2.0])]
SIGNS = st.sampled_from([1.0, -1.0])


class BadError(Exception):
    def __repr__(self) -> str:
        raise RuntimeError

    __str__ = __repr__

    def __bool__(self) -> bool:
        raise RuntimeError


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_no_number_or_raises_is_the_worst_of_its_group(workers: int) -> None:
    @reward
    def odd(example: Example, text: str) -> Any:
        if text == "bad" and isinstance(answer, BaseException):
            raise answer
        return answer if text == "bad" else np.float32(-len(text))

    errors = ValueError("\n"), SystemExit(3), TimeoutError(), RecursionError(), BadError()
    for answer in (*NO_NUMBERS, *errors):
        values, failures, warnings = score(odd, workers)
        assert values == [[-4, -4, -4], [-5, -4, -5]], answer
        assert failures == 2
        assert len(warnings) == 1


OWN = """
from minigrpo import reward
def exits(example, text):
    if text == "bad":
        raise SystemExit(0)
    return len(text)
@reward(process=True)
def process(example, text):
    return exits(example, text)
@reward(timeout_s=5)
async def coroutine(example, text):
    return exits(example, text)
@reward(timeout_s=5)
async def tasks(example, text):
    return (await asyncio.gather(coroutine(example, text)))[0]
"""


def test_exit_of_a_function_fails_its_call_alone(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import asyncio" + OWN)
    for function in load_rewards(str(tmp_path / "own.py")):
        assert score(function)[:2] == ([[4, 4, 4], [4, 4, 5]], 2), function.name
    for kind in ("batched", "grouped"):
        exits = reward(**{kind: True})(lambda examples, texts: sys.exit(0))
        assert score(exits)[1] == 6


@given(st.data(), SIGNS)
def test_a_failure_never_pays_and_never_teaches(data: st.DataObject, weight: float) -> None:
    """Values are numbers, None, or failures; the same by a loop."""
    answers = st.one_of(st.none(), st.just(np.nan), st.floats(-3, 3))
    table = np.array(data.draw(st.lists(answers, min_size=6, max_size=6)), dtype=object)
    table = table.reshape(2, 3)
    in_order = as_scores(table.ravel().tolist(), 6)
    scores = settled(in_order.select(np.arange(6).reshape(2, 3)), weight)
    worst = min if weight > 0 else max

    def numbers(answers: Any) -> list[float]:
        return [x for x in answers if x is not None and x == x]

    for p, g in np.ndindex(2, 3):
        answer, group = table[p, g], table[p]
        found = (scores.values[p, g], scores.known[p, g], scores.failed[p, g])
        if answer is None:
            assert found == (0, False, False)
        elif answer == answer:
            assert found == (answer, True, False)
        else:
            rivals = numbers(group) or numbers(table.ravel())
            assert found == ((worst(rivals), True, True) if rivals else (0, False, True))


def test_none_is_no_failure_and_a_failed_success_is_wrong() -> None:
    @reward(success=True)
    def mine(example: Example, text: str) -> float | None:
        if example.answer == "2":
            return None
        return float("nan") if text == "bad" else 1.0

    table = RewardScorer(Lengths(), functions=[mine]).score(EXAMPLES, TEXTS)
    assert not table.scores["mine"].applies[0].any()
    assert table.total[0].tolist() == [4, 3, 4]
    right = Graded(EXAMPLES, TEXTS, table, "mine").right
    assert right.known.tolist() == [[False] * 3, [True] * 3]
    assert right.values[1].tolist() == [0, 1, 1]


def test_a_failure_with_nothing_to_compare_it_with_is_the_worst_of_its_group() -> None:
    @reward
    def mine(example: Example, text: str) -> float | None:
        return math.nan if text == "bad" else None

    length = reward(name="length")(lambda example, text: -len(text))
    table = RewardScorer(Task(), functions=[mine, length]).score(EXAMPLES, TEXTS)
    assert table.total.tolist() == [[-4, -4, -4], [-5, -4, -5]]
    assert table.total_known.tolist() == [[True, False, True], [False, True, True]]


def test_a_group_in_which_a_reward_always_fails_teaches_nothing() -> None:
    @reward
    def mine(example: Example, text: str) -> float:
        return math.nan if example.answer == "2" else 1.0

    length = reward(lambda example, text: len(text), name="length")
    down = reward(lambda example, text: math.nan, name="down", weight=0.0)  # and costs nothing
    table = RewardScorer(Task(), functions=[mine, length, down]).score(EXAMPLES, TEXTS)
    assert table.total.tolist() == [[4, 4, 4], [4, 5, 6]]
    assert table.total_known.all()


@pytest.mark.parametrize("kind", ["batched", "grouped"])
def test_a_wrong_number_of_values_fails_the_call_and_one_that_is_no_number_itself(
    kind: str,
) -> None:
    odd = reward(**{kind: True}, name="odd")(lambda examples, texts: answer)
    for answer in (1.0, "123", [1.0], [1.0] * 9, {1.0, 2.0, 3.0}, [np.nan] * 5):
        table = RewardScorer(Lengths(), functions=[odd]).score(EXAMPLES, TEXTS)
        assert table.scores["odd"].failed.all(), answer
        assert not table.scores["odd"].known.any()
        assert not table.total_known.any()
        assert not table.total.any()
    some = reward(**{kind: True}, name="odd")(
        lambda _, texts: [math.nan if text == "bad" else len(text) for text in texts]
    )
    values, failures, warnings = score(some)
    assert values == [[4, 4, 4], [4, 4, 5]]
    assert failures == 2
    assert len(warnings) == 1


def test_tensors_and_arrays_are_copied_because_they_may_be_used_again() -> None:
    buffer = torch.zeros(3, dtype=torch.bfloat16, requires_grad=True)

    @reward(grouped=True)
    def reused(example: Example, texts: list[str]) -> torch.Tensor:
        buffer.data[:] = int(example.answer)
        return buffer

    assert score(reused, workers=1)[0] == [[2] * 3, [4] * 3]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_call_that_hangs_is_given_up(workers: int) -> None:
    hold = threading.Event()

    @reward(timeout_s=0.05)
    def slow(example: Example, text: str) -> float:
        if text == "bad":
            hold.wait()
        return len(text)

    found = score(slow, workers)[:2]
    hold.set()  # so that no thread outlives its test
    assert found == ([[4, 4, 4], [4, 4, 5]], 2)
    wait_until(lambda: signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0)  # nobody waits for it


def test_a_process_whose_reward_hangs_exits() -> None:
    program = """
import time
from minigrpo.rewards.functions import reward
from minigrpo.rewards.scorer import RewardScorer
from minigrpo.task import Task
from minigrpo.types import Completion, Example

hangs = reward(lambda example, text: time.sleep(1000), name="hangs", timeout_s=0.1)
scorer = RewardScorer(Task(), functions=[hangs], workers=2)
texts = [Completion("a"), Completion("b")]
assert scorer.score([Example("?")], [texts]).scores["hangs"].failed.all()
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)


HANGS = """
import re
from minigrpo import reward

@reward(timeout_s=0.2)
def backtracks(example, text):  # and holds Python's lock for ages after one question
    answer = "a" * 40 + "!" if example.answer == "3" else text
    return float(bool(re.match("(a+)+$", answer)))  # the line that hangs

lengths = reward(name="lengths")(lambda example, text: len(text))  # stays in the run
"""
TRAINS = """
from pathlib import Path
from minigrpo.runtime import hangs
from tests.steps import tiny_trainer
from tests.tiny import write_jsonl

hangs.GRACE_S = 0.5
rows = [{"question": f"What is {n}?", "answer": str(n)} for n in range(7)]
settings = {"data": str(write_jsonl(Path("rows.jsonl"), rows)), "rewards": "rewards.py"}
settings |= {"task": "prompts", "prompts_per_step": 7, "group_size": 2, "max_steps": 1}
settings |= {"eval_size": 1, "reward_weights": {}, "resume": "auto", "parallel_rewards": False}
tiny_trainer(Path("run").absolute(), **settings).fit()
"""


def test_a_call_that_holds_the_lock_ends_a_run_with_a_trace(tmp_path: Path) -> None:
    """In a worker process, it is ended alone."""
    (tmp_path / "train.py").write_text(TRAINS)
    command, env = [sys.executable, "train.py"], {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def train(rewards: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "rewards.py").write_text(rewards)
        return subprocess.run(
            command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True, timeout=90
        )

    hung = train(HANGS)
    line = HANGS[: HANGS.index("  # the line that hangs")].count("\n") + 1
    named = f'rewards.py", line {line} in backtracks'
    assert hung.returncode == -signal.SIGVTALRM and named in hung.stderr, hung.stderr

    resumed = train(HANGS.replace("timeout_s=0.2", "timeout_s=0.2, process=True"))
    assert resumed.returncode == 0, resumed.stderr
    (metrics,) = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert metrics["rewards/backtracks/failures"] == 2
    assert metrics["rewards/lengths/mean"] > 0


IN_FLIGHT = """
import asyncio
import time
from pathlib import Path
from minigrpo import reward

def goes_on(name):
    Path(name).touch()
    return Path("go").exists()

@reward(timeout_s=3)
def plain(example, text):
    while not goes_on("plain"):
        time.sleep(0.01)
    return 1.0

@reward(timeout_s=3)
async def coroutine(example, text):
    while not goes_on("coroutine"):
        await asyncio.sleep(0.01)
    return 1.0

@reward(timeout_s=3, process=True)
def process(example, text):
    while text != "first" and not goes_on("process"):
        time.sleep(0.01)
    return 1.0
"""
SCORES_IN_FLIGHT = """
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import rewards
from minigrpo.rewards.scorer import RewardScorer
from minigrpo.runtime import hangs
from minigrpo.task import Task
from minigrpo.types import Completion, Example

hangs.GRACE_S = 0.1
functions = rewards.plain, rewards.coroutine, rewards.process
scorers = [RewardScorer(Task(), functions=[function]) for function in functions]
scorers[2].score([Example("?")], [[Completion("first")]])  # the process is there
for _ in range(2):
    with ThreadPoolExecutor() as pool:
        tables = pool.map(lambda scorer: scorer.score([Example("?")], [[Completion("a")]]), scorers)
    totals = [table.total.tolist() for table in tables]
    for name in ("plain", "coroutine", "process", "go"):
        Path(name).unlink()
    print(*totals, flush=True)
"""


def test_calls_in_flight_outlast_signals_and_end_with_the_job(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(IN_FLIGHT)
    (tmp_path / "scores.py").write_text(SCORES_IN_FLIGHT)
    command, env = [sys.executable, "scores.py"], {"PYTHONPATH": str(ROOT)}
    calls = [tmp_path / name for name in ("plain", "coroutine", "process")]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE) as run:
        assert run.stdout
        wait_until(lambda: all(call.exists() for call in calls))
        others = descendants(run.pid)  # a worker process
        assert len(others) == 1

        # signals that the run handles reach all processes of a job
        for name in STOP_SIGNALS:
            for pid in others:
                os.kill(pid, signal.Signals[name])

        (tmp_path / "go").touch()
        assert run.stdout.readline() == b"[[1.0]] [[1.0]] [[1.0]]\n"

        # the same processes are there for the next calls, and end with the run
        wait_until(lambda: all(call.exists() for call in calls))
        assert descendants(run.pid) == others
        run.kill()
        run.wait()
        wait_until(lambda: not any(map(is_running, others)))


@pytest.mark.parametrize("kind", ["", "batched", "grouped", "task"])
def test_code_that_changes_its_example_changes_no_other_score(kind: str) -> None:
    def takes_all(example: Any, texts: Any) -> Any:
        for one in example if kind == "batched" else [example]:
            assert one.fields["numbers"]
            one.fields["numbers"].clear()
        return [0.0] * len(texts) if kind in ("batched", "grouped") else 0.0

    class Own(Lengths):
        def score(self, example: Example, text: str) -> Mapping[str, float]:
            return dict.fromkeys(self.reward_weights, takes_all(example, text))

    example = Example("?", fields={"numbers": [1, 2]})
    options = {kind: True} if kind in ("batched", "grouped") else {}
    functions = [] if kind == "task" else [reward(**options)(takes_all)]
    task = load_task(Own(), seed=0) if kind == "task" else Lengths()
    scorer = RewardScorer(task, functions=functions)
    for _ in range(2):
        scores = scorer.score([example], [group("a", "b")]).scores.values()
        assert not any(each.failed.any() for each in scores)
    assert example.fields["numbers"] == [1, 2]


def test_an_error_in_the_task_ends_the_run() -> None:
    class Broken(Lengths):
        def score(self, example: Any, text: Any) -> Any:
            raise LookupError

    for workers in (1, 2):
        with pytest.raises(LookupError):
            RewardScorer(Broken(), workers=workers).score(EXAMPLES, TEXTS)


def score_tokens(task: Task, functions: Sequence[RewardFunction]) -> RewardTable:
    """The table of completions of three tokens, whose log-probs are -0.5."""
    texts = [group("abc", "bcd"), group("cde", "xyz")]
    tokenizer = load_tokenizer("chess")
    others = {"tokenizer": tokenizer, "token_model": lambda name: name.upper()}
    scorer = RewardScorer(task, functions=functions, **others)
    ids = [[tokenizer.encode(text) for text in group] for group in texts]
    completions = replace(to_completions([[1], [1]], ids), sampler_logp=torch.full((2, 2, 3), -0.5))
    table = scorer.score(EXAMPLES, texts, completions, temperature=0.7)
    assert (completions.sampler_logp == -0.5).all()
    return table


def test_functions_of_tokens_see_log_probs_tokens_and_models_and_change_nothing() -> None:
    seen = []

    @reward(tokens=True, weight=2.0)
    def likelihood(batch: TokenBatch) -> torch.Tensor:
        ids = batch.completions.completion_ids
        seen.append([batch.decode(ids[1, 1].tolist()), batch.temperature, batch.model("m")])
        found = batch.completions.sampler_logp.sum(-1).clone()
        batch.completions.sampler_logp.zero_()
        batch.texts[0].clear()  # type: ignore[attr-defined]
        return found

    table = score_tokens(Lengths(), [likelihood])
    assert table.scores["likelihood"].values.tolist() == [[-1.5, -1.5], [-1.5, -1.5]]
    assert table.total.tolist() == [[0, 0], [0, 0]]  # 3 of length - 2 * 1.5
    assert seen[0] == ["xyz", 0.7, "M"]


def test_a_task_may_score_tokens_and_texts() -> None:
    class Both(Lengths):
        reward_weights: Mapping[str, float] = {"confidence": 4.0, "length": 1.0, "right": 2.0}
        token_rewards = ("confidence",)

        def score_tokens(self, batch: TokenBatch) -> Mapping[str, np.ndarray]:
            return {"confidence": np.array([[0.25, None], [0.5, 1.0]])}

    table = score_tokens(Both(), [])
    assert list(table.scores) == ["confidence", "length", "right"]
    assert table.total.tolist() == [[4, 4], [5, 7]]  # what is left out counts as the group's mean


def test_a_function_of_tokens_that_gives_no_values_ends_the_run() -> None:
    answers = [None, [1.0, 2.0], [[np.nan] * 2] * 2, [[1.0]] * 2]

    @reward(tokens=True)
    def odd(batch: TokenBatch) -> Any:
        return answers.pop()

    while answers:
        with pytest.raises((TypeError, ValueError)):
            score_tokens(Lengths(), [odd])
