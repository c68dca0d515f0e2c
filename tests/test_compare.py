"""`minigrpo compare`: which runs are paired, and what their paired tests show."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigrpo.config import Config
from minigrpo.runtime.statistics import Difference, mcnemar
from minigrpo.tools.compare import differences, runs_by_setting
from minigrpo.tools.runs import read_run

from .test_tools import call
from .tiny import toml, write_jsonl


def write_run(
    folder: Path,
    right: Sequence[float],
    *,
    asked: str = "example",
    similarity: Sequence[float] = (),
    **settings: Any,
) -> Path:
    """The files of a finished run whose last answers are right (1) or wrong (0).

    Runs with the same `asked` have the same examples; the first of them have a similarity.
    """
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(toml(Config.of(**settings), a="1"))
    metrics = [{"step": step, "reward": step / 3, "step_time": 0.5} for step in (1, 2, 3)]
    write_jsonl(folder / "metrics.jsonl", metrics)
    ends = [(0, 0.25), (3, float(np.mean(right)))]
    shares = [{"step": x, "n": len(right), "exact_sampled": y, "exact": y} for x, y in ends]
    write_jsonl(folder / "eval.jsonl", shares)
    answers = []
    for i, x in enumerate(right):
        parts = {"exact": x, "reward": 2 * x}
        if i < len(similarity):
            parts["similarity"] = similarity[i]
        answers.append({"step": 3, "example": f"{asked} {i}", "greedy": parts, "sampled": parts})
    write_jsonl(folder / "held_out.jsonl", answers)
    return folder


def compared(*runs: Path, pool: bool = False) -> dict[str, Difference]:
    """The tests of the second setting against the first by measure."""
    first, second = runs_by_setting([read_run(run, print) for run in runs], pool).values()
    return differences(first, second)


def test_versions_of_a_users_file_are_not_pooled(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(n), [1], seed=n), print) for n in range(3)]
    files = [replace(run, versions={"/l.py": x * 64}) for run, x in zip(runs, "aab", strict=True)]
    assert [len(same) for same in runs_by_setting(files, pool=True).values()] == [2, 1]


def test_examples_are_paired_and_tested_by_mcnemar(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [1] * 30 + [0] * 30)
    b = write_run(tmp_path / "b", [1] * 29 + [0] + [1] * 12 + [0] * 18, learning_rate=1e-3)
    found = compared(a, b)["exact_sampled"]
    assert found.n == 60 and found.change.value == pytest.approx(11 / 60)
    assert found.is_shown and found.p == mcnemar(1, 12) == pytest.approx(2 * (1 + 13) / 2**13)


def test_only_the_examples_that_both_were_asked_are_compared(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [1, 0] * 20, similarity=[0.5] * 9)
    b = write_run(tmp_path / "b", [1, 0] * 10, similarity=[0.5] * 7)
    other = write_run(tmp_path / "c", [1, 0] * 20, asked="else")
    assert (compared(a, b)["exact"].n, compared(a, b)["similarity"].n) == (20, 7)
    assert compared(a, other) == {}
    # nor are rewards that are weighted differently
    a, c = (write_run(tmp_path / name, [1, 0] * 20, seed=i) for i, name in enumerate("de"))
    b = write_run(tmp_path / "f", [1, 0] * 20, reward_weights="similarity=1")
    assert compared(a, b).keys() == {"exact", "exact_sampled"}
    assert compared(a, c).keys() == {"exact", "exact_sampled", "reward", "reward_sampled"}


def seeds(
    folder: Path, name: str, right: Sequence[Sequence[float]], asked: str = "", **settings: Any
) -> list[Path]:
    """Runs of one setting with other seeds, by default each with examples of its own."""
    return [
        write_run(folder / f"{name}-{seed}", x, asked=asked or str(seed), seed=seed, **settings)
        for seed, x in enumerate(right)
    ]


def test_runs_are_paired_by_their_seeds(tmp_path: Path) -> None:
    first = [read_run(x, print) for x in seeds(tmp_path, "a", [[1, 0], [1, 1], [0, 0]])]
    second = [read_run(x, print) for x in seeds(tmp_path, "b", [[0, 0], [0, 1], [1, 1]])]
    found = differences(first, second[1:])["exact_sampled"]
    assert found.n == 4 and found.p == mcnemar(1, 2)


@pytest.mark.parametrize(
    ("won", "shown"), [((10, -2, 9), False), ((10, 9, 11), True), ((1, 1, 1), False)]
)
def test_three_seeds_decide_by_spread(tmp_path: Path, won: tuple[int, ...], shown: bool) -> None:
    """All examples together would show the first difference too.

    The last ones agree by chance: without spread, their interval would have no length.
    """
    a = seeds(tmp_path, "a", [[1] * 10 + [0] * 40] * 3)
    b = seeds(tmp_path, "b", [[1] * (10 + x) + [0] * (40 - x) for x in won], kl_coef=0.1)
    found = compared(*a, *b, pool=True)["exact"]
    assert found.is_shown == shown
    assert found.change.value == pytest.approx(sum(won) / 150)
    assert math.isnan(found.p)


@pytest.mark.parametrize("asked", ["the same", ""])
def test_examples_that_seeds_share_count_once(tmp_path: Path, asked: str) -> None:
    """Four examples won by both seeds are four, not eight."""
    a, b = ([1.0] * won + [0.0] * (64 - won) for won in (30, 34))
    first = seeds(tmp_path, "a", [a, a], asked)
    second = seeds(tmp_path, "b", [b, b], asked, kl_coef=0.1)
    found = compared(*first, *second, pool=True)["exact"]
    assert found.n == (64 if asked else 128)
    assert found.is_shown == (not asked)


def test_the_command_draws_runs_of_any_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    a = write_run(tmp_path / "[bold] a $x_", [1, 0] * 8)
    b = write_run(tmp_path / "b", [1, 1] * 8, group_size=8)
    assert call("compare", a, b, "--plot", str(tmp_path / "c.png")) == 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "argv", [["a", "nowhere"], ["a", "."], ["a", "b", "--plot", "a/metrics.jsonl"]]
)
def test_misuse_is_code_2(tmp_path: Path, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    a, _ = (write_run(tmp_path / name, [1, 0]) for name in "ab")
    monkeypatch.chdir(tmp_path)
    before = (a / "metrics.jsonl").read_bytes()
    assert call("compare", *argv) == 2
    assert (a / "metrics.jsonl").read_bytes() == before
