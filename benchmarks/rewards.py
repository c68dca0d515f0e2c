"""How long scoring takes: `python benchmark.py rewards`.

The completions are samples of the shipped model at temperature 1. Every variant must give the same
rewards as the plain one, or the benchmark fails. Times are medians of repeats that take turns. The
rank cache is warmed by *other* completions of the same number, as it would be by the previous step.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import chess
import Levenshtein
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from minigrpo.config import Config
from minigrpo.rewards import RewardFunction, RewardScorer
from minigrpo.runtime.constraints import AtLeast
from minigrpo.runtime.flags import ConfigError
from minigrpo.tasks.chess_env import ENDING, ChessEnv
from minigrpo.tasks.fen import _rank
from minigrpo.trainer import Trainer
from minigrpo.types import Example

from .flags import BenchmarkFlags, Positive, PositiveOrZero
from .probe import made_by

GROUP = 8
HOSTILE = [
    "",
    "\0" * 50,
    "\ud800",
    "٠" * 100,
    "NaN+nan+0+0",
    "a" * 10**6,
    "+" * 10**6,
    " " * 10**6,
    "9" * 10**6,
    "8/" * 10**5,
]

Texts = list[list[str]]
Batch = tuple[list[Example], Texts]


@dataclass(frozen=True)
class Rewards(BenchmarkFlags):
    """Time of scoring alone, and what a step saves by overlapping it with the rollout."""

    sizes: Annotated[tuple[int, ...], AtLeast(GROUP)] = (64, 1024, 16384)
    """Numbers of completions; multiples of 8."""
    repeats: Positive = 7
    """Timed runs per variant."""
    steps: PositiveOrZero = 12
    """Training steps with and without --overlap-rewards; 0: none."""
    json: Path | None = None
    """Write the figures here."""

    def run(self, console: Console) -> dict[str, Any]:
        for size in self.sizes:
            if size % GROUP:
                raise ConfigError(f"--sizes must be multiples of {GROUP}, got {size}")
        with TemporaryDirectory() as folder:
            trainer = Trainer(
                Config.of(out_dir=f"{folder}/run", max_steps=10**6, group_size=GROUP), quiet=True
            )
            rows = []
            for size in self.sizes:
                now, before = (
                    _completions(trainer, size // GROUP, seed, console) for seed in (0, 1)
                )
                rows.append(_time_variants(now, before, self.repeats if size <= 1024 else 3))
                console.print(_table(rows[-1]))
            waiting = _time_waiting(now[0][:8], [group[:] for group in now[1][:8]])
            console.print(_table(waiting))
            worst = _worst_hostile()
            console.print(
                f"hostile texts (1 MB, NUL, surrogates, Arabic digits, NaN): at most "
                f"{1e6 * worst:.0f} µs each"
            )
            overlap = _time_overlap(Path(folder), self.steps, console) if self.steps else {}
        return {
            "benchmark": "rewards",
            "made_by": made_by(self.command()),
            "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
            "scoring": rows,
            "a reward that waits 5 ms": waiting,
            "hostile_max_us": 1e6 * worst,
            "overlap": overlap,
        }


def _completions(trainer: Trainer, prompts: int, seed: int, console: Console) -> Batch:
    """GROUP completions by the model for each of `prompts` training prompts."""
    examples: list[Example] = []
    texts: Texts = []
    for block in track(
        range(0, prompts, 32),
        f"sampling {prompts * GROUP} completions",
        console=console,
        transient=True,
    ):
        some = [
            trainer.task.train(10**6 * (seed + 1) + i)
            for i in range(block, min(block + 32, prompts))
        ]
        rolled = trainer.source.roll_out(some, step=seed)  # type: ignore[attr-defined]
        examples += some
        texts += rolled.texts
    return examples, texts


def plain_score(example: Example, text: str) -> dict[str, float]:
    """The straightforward implementation: python-chess parses and writes every FEN."""
    true_fen, true_ending = example.answer.split("+", 1)
    fen, *rest = text[:200].split("+", 1)
    truth, found = (
        ENDING.fullmatch(true_ending),
        ENDING.fullmatch(rest[0]) if rest and len(text) <= 200 else None,
    )
    assert truth is not None
    valid = False
    if fen.isascii() and len(fen) <= 100:
        try:
            board = chess.Board(fen)
            short = all(len(clock) <= 4 for clock in fen.split(" ")[4:])
            valid = board.is_valid() and short and board.fen(en_passant="fen") == fen
        except ValueError:
            pass
    longest = max(len(fen), len(true_fen))
    return {
        "format": float(found is not None),
        "valid": float(valid),
        "similarity": 1 - Levenshtein.distance(fen, true_fen) / longest if longest else 1.0,
        "exact_fen": float(fen == true_fen),
        "reward_value": float(found is not None and found[1] == truth[1]),
        "flags": sum(found[i] == truth[i] for i in (2, 3)) / 2 if found else 0.0,
    }


def _one_by_one(score: Callable[[Example, str], Any], batch: Batch) -> dict[str, np.ndarray]:
    examples, texts = batch
    scores = [
        [score(example, text) for text in group]
        for example, group in zip(examples, texts, strict=True)
    ]
    return {
        name: np.array([[s[name] for s in row] for row in scores], dtype=np.float32)
        for name in ChessEnv.parts
    }


def _all_at_once(task: ChessEnv, batch: Batch) -> dict[str, np.ndarray]:
    """Score every text, including duplicates."""
    examples, texts = batch
    asked = [example for example, group in zip(examples, texts, strict=True) for _ in group]
    columns = task.score_batch(asked, [text for group in texts for text in group])
    return {
        name: np.asarray(x, dtype=np.float32).reshape(len(texts), -1) for name, x in columns.items()
    }


def _time_variants(now: Batch, before: Batch, repeats: int) -> dict[str, Any]:
    task = ChessEnv(0)
    scorers = {workers: RewardScorer(task, workers=workers) for workers in (0, 1, 2, 4)}
    variants: dict[str, Callable[[Batch], Any]] = {
        "plain: python-chess parses every FEN": lambda batch: _one_by_one(plain_score, batch),
        "+ cheap rejection, bit boards, distances in one call": lambda batch: _all_at_once(
            task, batch
        ),
        "+ each distinct (prompt, text) once": lambda batch: scorers[0].score(*batch).parts,
        "the same in a pool of 1": lambda batch: scorers[1].score(*batch).parts,
        "the same in a pool of 2": lambda batch: scorers[2].score(*batch).parts,
        "the same in a pool of 4": lambda batch: scorers[4].score(*batch).parts,
    }
    expected = _one_by_one(plain_score, now)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, variant in variants.items():
            _rank.cache_clear()
            variant(before)
            start = time.perf_counter()
            found = variant(now)
            seconds[name].append(time.perf_counter() - start)
            if any(not np.array_equal(found[part], expected[part]) for part in expected):
                raise AssertionError(f"{name}: rewards differ from the plain ones")
    for scorer in scorers.values():
        scorer.close()
    texts = now[1]
    distinct = sum(len(set(group)) for group in texts)
    size = sum(map(len, texts))
    share = float(expected["exact_fen"].mean())
    title = f"{size} completions, {distinct} distinct in their group, {share:.0%} with the true FEN"
    return {"title": title, "ms": {name: 1e3 * median(times) for name, times in seconds.items()}}


def _time_waiting(examples: list[Example], texts: Texts) -> dict[str, Any]:
    """A case where threads help: a reward that waits for an engine or a subprocess."""

    def wait(example: Example, text: str) -> float:
        time.sleep(0.005)
        return 1.0

    milliseconds = {}
    for workers in (0, 1, 2, 4, 16):
        scorer = RewardScorer(
            ChessEnv(0), functions=[RewardFunction(wait, "waits")], workers=workers
        )
        scorer.score(examples, texts)
        start = time.perf_counter()
        scorer.score(examples, texts)
        milliseconds["serial" if not workers else f"pool of {workers}"] = 1e3 * (
            time.perf_counter() - start
        )
        scorer.close()
    distinct = sum(len(set(group)) for group in texts)
    return {
        "title": f"a reward that waits 5 ms, {distinct} distinct completions",
        "ms": milliseconds,
    }


def _worst_hostile() -> float:
    task, example, worst = ChessEnv(0), ChessEnv(0).train(0), 0.0
    for text in HOSTILE:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            task.score(example, text)
            times.append(time.perf_counter() - start)
        worst = max(worst, median(times))
    return worst


def _time_overlap(folder: Path, steps: int, console: Console) -> dict[str, Any]:
    """Seconds per step, interleaved, with four rollout batches and a reference model to overlap."""
    options: dict[str, Any] = {
        "group_size": GROUP,
        "rollout_batch_size": 4,
        "kl_coef": 0.05,
        "max_steps": 10**6,
        "warmup_steps": 10**6,
    }
    variants: dict[str, dict[str, Any]] = {
        "overlapped": {"overlap_rewards": True},
        "not overlapped": {"overlap_rewards": False},
        "not overlapped, no pool": {"overlap_rewards": False, "parallel_rewards": False},
    }
    trainers = {
        name: Trainer(Config.of(**options, **flags, out_dir=str(folder / name)), quiet=True)
        for name, flags in variants.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for step in track(range(steps + 2), "training steps", console=console, transient=True):
        for name, trainer in trainers.items():
            start = time.perf_counter()
            trainer.learner.learn(trainer.source.batch(step), step)
            if step >= 2:
                seconds[name].append(time.perf_counter() - start)
    result = {
        "title": "a step of 16 prompts x 8 completions, 4 rollout batches, with a KL term",
        "ms": {name: 1e3 * median(s) for name, s in seconds.items()},
    }
    console.print(_table(result))
    return result


def _table(result: dict[str, Any]) -> Table:
    table = Table(title=result["title"], title_justify="left")
    table.add_column("variant")
    table.add_column("ms", justify="right")
    table.add_column("speedup", justify="right")
    first = next(iter(result["ms"].values()))
    for name, milliseconds in result["ms"].items():
        table.add_row(name, f"{milliseconds:.2f}", f"{first / milliseconds:.2f}")
    return table
