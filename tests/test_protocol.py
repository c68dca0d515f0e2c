"""The protocol of tasks and rewards: fields, groups, parts that do not concern an example, the
success of a task, pass@k, intervals, and the settings of built-in tasks.
"""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from minigrpo import Config, Trainer, reward
from minigrpo.evaluate import Graded, evaluate, measure, pass_at_k
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.rewards import RewardScorer
from minigrpo.runtime import measures
from minigrpo.runtime.build import make_scorer, make_task
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.measures import Estimate, estimate, headline, student_t, wilson
from minigrpo.runtime.reward_functions import RewardFunction, check_part_name
from minigrpo.runtime.rollout_metrics import counts_of, rollout_metrics
from minigrpo.runtime.settings import description
from minigrpo.runtime.task_sources import task_sources
from minigrpo.runtime.trained import load_model
from minigrpo.tasks import registry
from minigrpo.tasks.chess_env import ChessEnv
from minigrpo.tasks.confidence import with_confidence
from minigrpo.tasks.pairs import Pairs
from minigrpo.tasks.registry import TASKS, TaskRow, load_task
from minigrpo.tools import curves, sample
from minigrpo.tools import evaluate as evaluate_tool
from minigrpo.tools.run_data import read_run
from minigrpo.types import Completions, Example, RewardTable, RolloutBatch

from .gradients import TINY
from .test_best_move import annotated

TOKENIZER = load_tokenizer("chess")
NAN = math.nan


class Sums:
    """Say whether a sum is right; a part for each parity of the prompt, and a bet on the answer."""

    parts: Mapping[str, float] = {"even": 1.0, "odd": 2.0, "solved": 0.0, "bet": 0.0}
    success = "solved"

    def held_out(self, number: int) -> Example:
        return Example(str(number), "right", index=number, kind="odd" if number % 2 else "even")

    train = held_out

    def score(self, example: Example, text: str) -> dict[str, float]:
        right, odd = float(text.startswith("r")), example.kind == "odd"
        parts = {"even": NAN if odd else right, "odd": right if odd else NAN}
        return {**parts, "solved": right, "bet": len(text) / 10}

    def summaries(self, parts: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {"brier": float(np.mean((parts["bet"] - parts["solved"]) ** 2)), "never": NAN}


class Answers:
    """Stands in for a sampler: each completion is the next of the given texts."""

    tokenizer = TOKENIZER
    config = Config.of(max_new_tokens=9)

    def __init__(self, greedy: list[str], sampled: list[list[str]]) -> None:
        self.greedy, self.sampled = greedy, sampled

    def complete(
        self, examples: Any, *, num_samples: int = 1, u: Any = None, batch_size: int = 0
    ) -> Any:
        groups = [[text] for text in self.greedy] if u is None else self.sampled
        assert len(groups) == len(examples) and {len(x) for x in groups} == {num_samples}
        for start in range(0, len(groups), 2):  # in parts of two prompts
            part = groups[start : start + 2]
            encoded = [[[*TOKENIZER.encode(text), TOKENIZER.eot] for text in x] for x in part]
            longest = max(len(ids) for group in encoded for ids in group)
            padded = [[ids + [0] * (longest - len(ids)) for ids in group] for group in encoded]
            sizes = torch.tensor([[len(ids) for ids in group] for group in encoded])
            prompts = torch.zeros(len(part), 1, dtype=torch.int64)
            mask = torch.arange(longest) < sizes[..., None]
            one = torch.ones(len(part), dtype=torch.int64)
            yield Completions(prompts, one, torch.tensor(padded), mask)


def evaluated(greedy: list[str], sampled: list[list[str]]) -> dict[str, float]:
    task: Any = Sums()
    sampler: Any = Answers(greedy, sampled)
    samples = len(sampled[0])
    return evaluate(sampler, task, RewardScorer(task), size=len(greedy), seed=0, samples=samples)


# --- fields ---------------------------------------------------------------------------------------


def test_all_keys_of_a_data_line_reach_the_reward_and_tell_examples_apart(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    records = [
        {"prompt": f"p{i // 2}", "answer": "a", "tests": [f"t{i % 2}"], "id": None}
        for i in range(60)
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    pairs = Pairs([path], seed=0)
    found = [pairs.train(i) for i in range(len(records) - pairs.num_held_out)]
    assert all(example.fields in records for example in found)
    path.write_text(
        path.read_text() + '\n{"prompt": "a", "answer": "b", "x": ' + "[" * 100 + "]" * 100 + "}"
    )
    with pytest.raises(ValueError, match="line 61: its brackets are nested more than 100 deep"):
        Pairs([path], seed=0)
    twins = [example for example in found if example.prompt == found[0].prompt]
    assert len({json.dumps(example.fields) for example in twins}) == 2

    @reward()
    def second(example: Example, text: str) -> float:
        example.fields["tests"].append("changed")  # in this example's own copy
        return float(example.fields["tests"][0] == "t1")

    questions = [Example("p", "a", fields=x.fields) for x in twins] * 2
    scores = RewardScorer(pairs, functions=[second]).score(questions, [["x", "x"]] * 4)
    expected = [[float(x.fields["tests"][0] == "t1")] * 2 for x in questions]
    assert scores.parts["second"].tolist() == expected
    assert found[0].fields == pairs.train(0).fields  # none was written into


def test_an_example_whose_fields_cannot_be_compared_equals_only_itself() -> None:
    calls: list[str] = []

    @reward()
    def count(example: Example, text: str) -> float:
        calls.append(text)
        return 0.0

    def scored(fields: Any) -> int:
        calls.clear()
        examples = [Example("p", "a", fields=x) for x in fields]
        RewardScorer(ChessEnv(0), functions=[count]).score(examples, [["x"]] * len(fields))
        return len(calls)

    array = np.zeros(2)
    assert scored([{"a": array}, {"a": array}]) == 2  # `==` of arrays has no truth value
    assert scored([{"a": [1, {"b": None}]}, {"a": [1, {"b": None}]}]) == 1
    assert scored([{"a": 1}, {"a": True}, {"a": 1.0}, {"a": "1"}]) == 4


def test_an_annotated_line_keeps_its_fields(tmp_path: Path) -> None:
    path = annotated(tmp_path / "a.jsonl", 20)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("\n".join(json.dumps({**line, "id": i}) for i, line in enumerate(lines)))
    example = load_task("best-move", seed=0, data=str(path)).train(0)
    assert lines[example.fields["id"]]["prompt"] == example.prompt


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_grouped_reward_ranks_all_completions_of_a_prompt(workers: int) -> None:
    seen: list[tuple[str, list[str]]] = []

    @reward(grouped=True, floor=-1.0)
    def rank(example: Example, texts: Sequence[str]) -> list[float]:
        seen.append((example.prompt, list(texts)))
        if "bad" in texts:
            raise ValueError("bad")
        return [sorted(texts).index(text) / len(texts) for text in texts]

    examples = [Example("1", "b"), Example("2", "b"), Example("1", "b")]
    texts = [["b", "a", "b", "c"], ["a", "bad", "a", "a"], ["a", "a", "a", "a"]]
    said: list[str] = []
    scorer = RewardScorer(ChessEnv(0), functions=[rank], workers=workers, warn=said.append)
    table = scorer.score(examples, texts)
    scorer.close()
    assert table.parts["rank"].tolist() == [[0.25, 0, 0.25, 0.75], [-1] * 4, [0] * 4]
    assert table.failures["rank"] == 4 and len(said) == 1 and "ValueError: bad" in said[0]
    asked = [(x.prompt, group) for x, group in zip(examples, texts, strict=True)]
    assert sorted(seen) == sorted(asked)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grouped": True, "batched": True}, "takes one of batched and grouped, not both"),
        ({"grouped": 1}, "grouped must be True or False, got int .1"),
    ],
)
def test_a_reward_takes_one_kind_of_argument(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):

        @reward(**options)
        def both(example: Example, texts: list[str]) -> list[float]:
            return []

    with pytest.raises(ConfigError, match=r"takes \(example, texts\)"):

        @reward(grouped=True)
        def alone(example: Example) -> list[float]:
            return []


# --- parts that do not concern an example ---------------------------------------------------------


def table_of(number: int) -> RewardTable:
    task: Any = Sums()
    examples = [task.train(number), task.train(number + 2)]
    return RewardScorer(task).score(examples, [["r", "w"], ["r", "r"]])


def test_nan_counts_0_in_the_total_and_is_left_out_of_the_mean_of_a_batch() -> None:
    table = table_of(0)
    assert np.isnan(table.parts["odd"]).all() and not table.failures["odd"]
    assert table.total.tolist() == [[1, 0], [1, 1]]
    ids, one = torch.zeros(2, 2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    completions = Completions(ids[:, 0], one, ids, torch.ones(2, 2, 1, dtype=torch.bool))
    batch = RolloutBatch([Example("a", "")] * 2, completions, [["", ""]] * 2, table)
    own = rollout_metrics(batch, [])
    assert own["rewards/even/mean"] == 0.75 and math.isnan(own["rewards/odd/mean"])
    logged = DistContext().combine(own, counts_of(batch))
    assert "rewards/odd/mean" not in logged and logged["rewards/even/mean"] == 0.75
    assert logged["reward"] == 0.75


def test_a_mean_over_processes_weighs_how_many_values_each_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = torch.tensor([[0.5, 1.0, 0.0, 4.0], [1.0, 3.0, 0.0, 0.0]], dtype=torch.float64)
    monkeypatch.setattr(DistContext, "sum", lambda self, x: torch.stack([x[0], there]))
    here = {"reward": 0.25, "a": 0.0, "none": NAN, "only there": 1.0}
    counts = {"a": 1, "none": 0, "only there": 2}
    found = DistContext(world_size=2).combine(here, counts)
    assert found == {"reward": 0.375, "a": 0.75, "only there": 1.0}


class Odd(Sums):
    """A part that is NaN for some texts: 0 divided by 0, say."""

    parts: Mapping[str, float] = {"ratio": 1.0}

    def score(self, example: Example, text: str) -> dict[str, float]:
        return {"ratio": 1.0 if text else NAN}


def test_nan_for_some_texts_of_a_prompt_is_a_failure() -> None:
    task: Any = Odd()
    said: list[str] = []
    table = RewardScorer(task, warn=said.append).score([task.train(0)], [["x", "", "x"]])
    assert table.parts["ratio"].tolist() == [[1, 0, 1]] and table.failures == {"ratio": 1}
    assert len(said) == 1 and "NaN for some completions of a prompt" in said[0]

    class Trusted(Odd):
        def score(self, example: Example, text: str) -> dict[str, float]:
            raise AssertionError("has score_batch")

        def score_batch(self, examples: Any, texts: Sequence[str]) -> dict[str, list[float]]:
            return {"ratio": [1.0 if text else NAN for text in texts]}

    task = Trusted()
    with pytest.raises(ValueError, match="reward ratio: returned NaN for some completions"):
        RewardScorer(task).score([task.train(0)], [["x", ""]])


# --- evaluation -----------------------------------------------------------------------------------


def test_an_evaluation_has_the_success_first_and_every_part_greedy_and_sampled() -> None:
    sampled = [["r", "w", "r", "w"], ["r", "r", "r", "r"], ["w", "w", "w", "w"]]
    found = evaluated(["r", "w", "rrrrr"], sampled)
    assert list(found)[:3] == ["n", "solved_sampled", "solved"] and headline(found) == "solved"
    expected = {
        "n": 3,
        "solved_sampled": 0.5,
        "solved": 2 / 3,
        "even": 1,
        "even_sampled": 0.25,
        "odd": 0,
        "odd_sampled": 1,
        "bet": (0.1 + 0.1 + 0.5) / 3,
        "bet_sampled": 0.1,
        "reward": 2 / 3,
        "reward_sampled": (0.5 + 2 + 0) / 3,
        "brier": (0.9**2 + 0.1**2 + 0.5**2) / 3,
        "brier_sampled": (0.9**2 + 0.1**2) / 2,
        "pass@1": 0.5,
        "pass@2": ((1 - 1 / 6) + 1 + 0) / 3,
        "pass@4": 2 / 3,
        "solved/even": 1,
        "solved/odd": 0,
        "count/even": 2,
        "count/odd": 1,
    }
    assert found == pytest.approx(expected) and list(found) == list(expected)


def test_every_measure_has_an_interval_and_the_same_seed_gives_the_same() -> None:
    task: Any = Sums()
    greedy = ["r", "w", "rrrrr", "ww"] * 5
    sampler: Any = Answers(greedy, [[text] for text in greedy])
    first, again = (measure(sampler, task, RewardScorer(task), size=20, seed=0) for _ in range(2))
    assert first == again and "pass@1" not in first
    for name, found in first.items():
        if name != "n" and not name.startswith("count/"):
            assert found.low < found.value < found.high or found.value in (found.low, found.high)
            assert found.low < found.high, name
    assert first["solved"] == wilson(0.5, 20)
    # the bootstrap interval of a mean is close to the normal one
    errors = (np.array([0.9, 0.1, 0.5, 0.2]) ** 2).repeat(5)
    half = 1.96 * errors.std() / math.sqrt(20)
    assert first["brier"].high - first["brier"].low == pytest.approx(2 * half, rel=0.15)


@pytest.mark.parametrize("name", ["solved_sampled", "pass@4", "reward", "n"])
def test_a_part_must_not_have_the_name_of_another_measure(name: str) -> None:
    with pytest.raises(ConfigError, match=f"must not be named {name}, because eval.jsonl"):
        check_part_name(name)
    task: Any = type("Clash", (Sums,), {"summaries": lambda self, parts: {"bet": 1.0}})()
    sampler: Any = Answers(["r"], [["r"]])
    with pytest.raises(ConfigError, match="different names, both have bet"):
        evaluate(sampler, task, RewardScorer(task), size=1, seed=0)


def test_summaries_that_change_their_arrays_change_no_other_measure() -> None:
    def clearing(self: Any, parts: Mapping[str, np.ndarray]) -> dict[str, float]:
        parts["solved"][:] = 0
        return {"none": float(parts["solved"].sum())}

    task: Any = type("Clearing", (Sums,), {"summaries": clearing})()
    sampler: Any = Answers(["r"], [["r", "r"]])
    found = evaluate(sampler, task, RewardScorer(task), size=1, seed=0, samples=2)
    assert (found["solved"], found["pass@2"], found["solved/even"]) == (1, 1, 1)


@pytest.mark.parametrize("n", range(1, 6))
def test_pass_at_k_is_the_share_of_k_subsets_with_a_right_sample(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(np.mean([max(x) for x in subsets]), abs=1e-12)
    for wrong in ((n, 0, 0), (n, 0, n + 1), (n, n + 1, 1), (n, -1, 1)):
        with pytest.raises(ValueError, match="must be from"):
            pass_at_k(*wrong)
    assert measures.ks_of(n) == {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 4], 5: [1, 2, 4, 5]}[n]


# --- intervals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (1, 10, 0.0179, 0.4042), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1)],
)
def test_shares_have_wilsons_interval(hits: int, n: int, low: float, high: float) -> None:
    found = estimate((np.arange(n) < hits).astype(float)[:, None])
    assert found.value == hits / n
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(("freedom", "t"), [(2, 4.303), (4, 2.776), (9, 2.262), (1000, 1.962)])
def test_students_t(freedom: int, t: float) -> None:
    assert student_t(freedom) == pytest.approx(t, rel=0.01)


def test_means_have_the_interval_of_independent_examples() -> None:
    found = estimate(np.array([[2.0], [4.0], [6.0], [NAN]]))
    half = 4.303 * 2 / math.sqrt(3)
    assert (found.value, found.low, found.high) == pytest.approx((4, 4 - half, 4 + half), abs=0.05)
    # four samples of one example say no more about other examples than one
    each = np.array([[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    assert estimate(each) == estimate(np.repeat(each, 4, axis=1))
    bounds = estimate(each)
    assert 0 < bounds.low < bounds.high < 1  # within what the values are
    single = estimate(np.array([[0.5]]))
    assert math.isnan(single.low) and str(single) == "0.500"
    assert math.isnan(estimate(np.full((3, 1), NAN)).value)
    assert str(Estimate(0.5, 0.25, 0.75)) == "0.500 [0.250, 0.750]"


def test_few_successes_of_many_samples_have_an_interval_that_covers_their_rate() -> None:
    rng = np.random.default_rng(0)
    rates = rng.beta(0.04, 1.96, (600, 100, 1))  # mean 0.02: Student's t covers it in 85 %
    found = [estimate((rng.random((100, 4)) < rate).astype(float)) for rate in rates]
    assert np.mean([x.low <= 0.02 <= x.high for x in found]) > 0.89


@pytest.mark.parametrize(
    ("a", "b", "n", "samples", "k"),  # rates drawn from a beta distribution
    [(9, 1, 100, 8, 4), (9, 1, 400, 16, 8), (90, 10, 100, 4, 2), (9, 1, 100, 4, 1)],
)
def test_pass_at_k_near_1_has_an_interval_that_covers_it(
    a: float, b: float, n: int, samples: int, k: int
) -> None:
    rng = np.random.default_rng(0)
    truth = 1 - math.prod((b + i) / (a + b + i) for i in range(k))  # 1 - E[(1 - rate)^k]
    values = np.array([pass_at_k(samples, right, k) for right in range(samples + 1)])
    rights = rng.binomial(samples, rng.beta(a, b, (300, n)))
    found = [estimate(values[right][:, None]) for right in rights]
    assert np.mean([x.low <= truth <= x.high for x in found]) > 0.92


# --- the headline ---------------------------------------------------------------------------------

OWN_TASK = """
from minigrpo.types import Example

class Mine:
    parts = {"solved": 1.0, "length": 0.5}
    success = "solved"

    def __init__(self, seed): ...

    def train(self, number):
        return Example(f"{number}=", "1", index=number, fields={"number": number})

    def held_out(self, number):
        return self.train(number + 10**6)

    def score(self, example, text):
        return {"solved": float("number" in example.fields), "length": 0.5}

    def summaries(self, parts):
        return {"longest": parts["length"].max()}
"""


def test_the_success_of_a_task_is_what_the_run_and_its_tools_report(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(OWN_TASK)
    options = {**TINY, "task": str(tmp_path / "mine.py"), "reward_weights": "", "max_steps": 1}
    options |= {"max_new_tokens": 2, "eval_samples": 2, "out_dir": str(tmp_path / "run")}
    Trainer(Config.of(**options)).fit()
    said = " ".join(capfd.readouterr().out.split())
    assert "held out, step 0: solved 100.0% [" in said and "exactly right" not in said
    assert re.search(r"solved 100\.0% [\d,]+ tok/s", said)
    for row in ("pass@2 sampled 1.000 [", "longest greedy 0.500 [", "solved sampled 1.000 ["):
        assert row in said
    record = json.loads((tmp_path / "run" / "eval.jsonl").read_text().splitlines()[-1])
    assert list(record)[:4] == ["step", "n", "solved_sampled", "solved"]
    assert record["solved"] == record["pass@2"] == 1 and record["longest"] == 0.5
    assert read_run(tmp_path / "run").success == "solved"
    curves.main([str(tmp_path / "run")])
    assert capfd.readouterr().out.count("100.0%") == 4
    sample.main([str(tmp_path / "run"), "--examples", "1"])
    said = capfd.readouterr().out
    assert "   right" in said and "wrong" not in said


OWN_SUCCESS = """
import minigrpo


@minigrpo.reward(weight=0.0, success=True)
def starts(example, text):
    return text.startswith("r")


@minigrpo.reward(weight=0.5, batched=True)
def size(examples, texts):
    return [len(text) for text in texts]
"""


def test_a_function_may_be_the_success_of_a_run_its_tools_and_its_confidences(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text(OWN_SUCCESS)
    (tmp_path / "mine.py").write_text(OWN_TASK)
    options = {**TINY, "task": str(tmp_path / "mine.py"), "reward_weights": "", "max_steps": 1}
    options |= {"max_new_tokens": 2, "out_dir": str(tmp_path / "run"), "rewards": str(rewards)}
    options["eval_samples"] = 2
    trainer = Trainer(Config.of(**options), quiet=True)
    trainer.fit()
    record = json.loads((tmp_path / "run" / "eval.jsonl").read_text().splitlines()[-1])
    assert list(record)[:4] == ["step", "n", "starts_sampled", "starts"]
    assert record["starts"] == record["pass@2"] == 0 and record["solved"] == 1
    sample.main([str(tmp_path / "run"), "--examples", "1"])
    assert "   wrong" in capfd.readouterr().out

    # the answer without its tags is judged, and the task's own success is one more part
    asked: Any = make_task(Config.of(**options, confidence=True))
    with closing(make_scorer(Config.of(**options, confidence=True), asked)) as scorer:
        texts = ["right<confidence>0.5</confidence>", "no<confidence>0</confidence>", "right"]
        table = scorer.score([asked.train(0)], [texts])
    assert scorer.success == "correct" and "starts" not in table.parts
    assert table.parts["correct"].tolist() == [[1, 0, 0]]
    assert table.parts["solved"].tolist() == [[1, 1, 0]]
    assert table.parts["brier"].tolist() == [[0.75, 1, 0]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"success": 1}, "success must be True or False"),
        ({"success": True, "floor": 1.0}, "success does not go with floor"),
        ({"success": True, "grouped": True}, "success does not go with grouped"),
    ],
)
def test_a_success_that_cannot_be_one_is_one_line(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):

        @reward(**options)
        def right(example: Example, texts: list[str]) -> list[float]:
            return []


def test_one_function_is_the_success_and_of_confidences_one_of_texts() -> None:
    first, other = (
        RewardFunction(lambda example, text: 1.0, name, success=True) for name in ("a", "b")
    )
    with pytest.raises(ConfigError, match="one function may have success=True, got a, b"):
        RewardScorer(ChessEnv(0), functions=[first, other])
    tokens = RewardFunction(lambda batch: [], "t", tokens=True, success=True)
    options: dict[str, Any] = {"seed": 0, "chat": False, "supervised": False}
    with pytest.raises(ConfigError, match="--confidence: t must judge texts, not tokens"):
        with_confidence(ChessEnv(0), tokens, **options)
    # a judge may fail, so even a task that scores batches gets a time limit
    (source,) = task_sources(with_confidence(ChessEnv(0), first, **options), timeout_s=2.0)
    assert source.timeout_s == 2


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('success = "solved"', 'success = "x"', "success must be one of the parts solved, length"),
        ('success = "solved"', 'success = "length"', "length is the success of the task, so it"),
        ('fields={"number": number}', "fields=[1]", "fields must be a dict whose keys are text"),
        ('{"longest": parts["length"].max()}', "3", "summaries: must return a dict of names and"),
        ('{"longest": parts', '{"n": parts', "summaries: a reward part must not be named n"),
    ],
)
def test_a_mistake_in_a_task_of_ones_own_is_one_line(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    (tmp_path / "mine.py").write_text(OWN_TASK.replace(old, new, 1))
    options = {**TINY, "task": str(tmp_path / "mine.py"), "reward_weights": "", "max_steps": 1}
    with pytest.raises(ConfigError, match=words) as error:
        Trainer(Config.of(**options, out_dir=str(tmp_path / "run")), quiet=True).fit()
    assert "\n" not in str(error.value) and "mine.py" in str(error.value)


# --- the table of tasks ---------------------------------------------------------------------------


@pytest.fixture
def mini(monkeypatch: pytest.MonkeyPatch) -> None:
    """A built-in task `mini` with settings of its own, and no shipped model."""
    settings = {"max_new_tokens": 7, "overlong": "punish", "overlong_buffer": 5}
    row = TaskRow(lambda request: ChessEnv(request.seed), lambda request: ChessEnv(1), (".x",))
    monkeypatch.setitem(TASKS, "mini", TaskRow(row.make, row.read, row.endings, settings=settings))


def test_settings_of_the_task_count_below_files_and_flags(mini: None, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('task = "mini"\noverlong_buffer = 3\n')
    found = Config.from_cli(["--config", str(tmp_path / "c.toml"), "--overlong", "mask"])
    assert found.sampling.max_new_tokens == 7 and found.loss.overlong_buffer == 3
    assert found.loss.overlong == "mask"
    assert Config.of(task="mini").loss.overlong == "punish"
    back = Config.of(task="mini", overlong_buffer=4).replace(task="chess-env")
    assert back.flat() == Config.of(overlong_buffer=4).flat()
    words = "Settings of the task mini: --max-new-tokens 7 --overlong punish --overlong-buffer 5."
    assert words in description(Config)


def test_the_rows_of_the_table_have_known_settings_and_shipped_models() -> None:
    for name, row in TASKS.items():
        assert Config.of(task=name).flat().items() >= row.settings.items()
        assert not row.shipped or Path(registry.shipped_model(name)).is_file()


def test_a_task_without_a_shipped_model_says_so(mini: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shipped: no model ships for --task mini; take scratch"):
        load_model(Path("shipped"), pytest.fail, task="mini")
    path = tmp_path / "a.jsonl"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"--data a file of questions must end with .x, got"):
        load_task("mini", seed=0, data=str(path))


def test_a_kind_may_have_the_name_of_all_examples() -> None:
    examples = [Example("p", "1", kind="all"), Example("q", "2", kind="other")]
    exact = np.array([[1.0], [0.0]])
    graded = Graded(examples, [["1"], ["x"]], RewardTable(exact, {"exact": exact}), "exact")
    loaded: Any = SimpleNamespace(task=None, config=SimpleNamespace(run=SimpleNamespace(seed=0)))
    found = evaluate_tool.measures(loaded, graded, graded)
    sizes = {name: record["n"].value for name, record in found.items()}
    assert sizes == {"all": 2, "all (kind)": 1, "other": 1}
