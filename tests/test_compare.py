"""`minigrpo compare`: which runs are paired, and what their paired tests show."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minigrpo.config import Config
from minigrpo.run.logging import Run, read_run
from minigrpo.statistics import Difference, mcnemar
from minigrpo.tools.compare import differences, runs_by_setting

from .test_tools import call
from .tiny import toml, write_jsonl

COSTS = {"step_time": 0.5, "memory/peak_mib": 9.0}  # of a step


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
    metrics = [{"step": step, "reward": step / 3, **COSTS} for step in (1, 2, 3)]
    write_jsonl(folder / "metrics.jsonl", metrics)
    share = float(np.mean(right))
    evaluations = [
        {"step": 0, "n": len(right), "exact_sampled": 0.25, "exact": 0.25},
        {"step": 3, "n": len(right), "exact_sampled": share, "exact": share},
    ]
    write_jsonl(folder / "eval.jsonl", evaluations)
    answers = []
    for i, x in enumerate(right):
        values = {"exact": x, "reward": 2 * x}
        if i < len(similarity):
            values["similarity"] = similarity[i]
        answers.append({"step": 3, "example": f"{asked} {i}", "greedy": values, "sampled": values})
    write_jsonl(folder / "held_out.jsonl", answers)
    return folder


def read(folders: Sequence[Path]) -> list[Run]:
    return [read_run(folder) for folder in folders]


def compared(*folders: Path, pool: bool = False) -> dict[str, Difference]:
    """The tests of the second setting against the first by measure."""
    first, second = runs_by_setting(read(folders), pool).values()
    return differences(first, second)


def seeds(
    folder: Path, name: str, right: Sequence[Sequence[float]], asked: str = "", **settings: Any
) -> list[Path]:
    """Runs of one setting with other seeds, by default each with examples of its own."""
    return [
        write_run(folder / f"{name}-{seed}", x, asked=asked or str(seed), seed=seed, **settings)
        for seed, x in enumerate(right)
    ]


def test_versions_of_a_users_file_are_not_pooled(tmp_path: Path) -> None:
    runs = read(seeds(tmp_path, "a", [[1]] * 3))
    hashes = ["a" * 64, "a" * 64, "b" * 64]
    runs = [replace(run, versions={"/l.py": x}) for run, x in zip(runs, hashes, strict=True)]
    settings = runs_by_setting(runs, pool=True)
    assert [len(pooled) for pooled in settings.values()] == [2, 1]


def test_examples_are_paired_and_tested_by_mcnemar(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [1] * 30 + [0] * 30)
    b = write_run(tmp_path / "b", [1] * 29 + [0] + [1] * 12 + [0] * 18)
    found = compared(a, b)["exact_sampled"]
    assert found.n == 60
    assert found.change.value == pytest.approx(11 / 60)
    assert found.p == mcnemar(1, 12)
    assert found.is_shown


def test_only_the_examples_that_both_were_asked_are_compared(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [1, 0] * 20, similarity=[0.5] * 9)
    b = write_run(tmp_path / "b", [1, 0] * 10, similarity=[0.5] * 7)
    other = write_run(tmp_path / "c", [1, 0] * 20, asked="else")
    found = compared(a, b)
    assert found["exact"].n == 20
    assert found["similarity"].n == 7
    assert compared(a, other) == {}


def test_runs_are_paired_by_their_seeds(tmp_path: Path) -> None:
    first = read(seeds(tmp_path, "a", [[1, 0], [1, 1], [0, 0]]))
    second = read(seeds(tmp_path, "b", [[0, 0], [0, 1], [1, 1]]))
    found = differences(first, second[1:])["exact_sampled"]
    assert found.n == 4
    assert found.p == mcnemar(1, 2)


@pytest.mark.parametrize(("won", "shown"), [([10, -2, 9], False), ([10, 9, 11], True)])
def test_three_seeds_decide_by_spread(tmp_path: Path, won: list[int], shown: bool) -> None:
    """All examples together would show the first difference too."""
    a = seeds(tmp_path, "a", [[1] * 10 + [0] * 40] * 3)
    b = seeds(tmp_path, "b", [[1] * (10 + x) + [0] * (40 - x) for x in won], kl_coef=0.1)
    found = compared(*a, *b, pool=True)["exact"]
    assert found.is_shown == shown
    assert found.change.value == pytest.approx(sum(won) / 150)
    assert found.p is None


def test_seeds_that_agree_by_chance_show_nothing(tmp_path: Path) -> None:
    """Without spread, an interval over the seeds would have no length."""
    a = seeds(tmp_path, "a", [[0] * 50] * 3)
    b = seeds(tmp_path, "b", [[1] + [0] * 49] * 3, kl_coef=0.1)
    assert not compared(*a, *b, pool=True)["exact"].is_shown


@pytest.mark.parametrize(("asked", "n"), [("the same", 64), ("", 128)])
def test_examples_that_seeds_share_count_once(tmp_path: Path, asked: str, n: int) -> None:
    """Four examples won by both seeds are four, not eight."""
    first = seeds(tmp_path, "a", [[1] * 30 + [0] * 34] * 2, asked)
    second = seeds(tmp_path, "b", [[1] * 34 + [0] * 30] * 2, asked, kl_coef=0.1)
    found = compared(*first, *second, pool=True)["exact"]
    assert found.n == n
    assert found.is_shown == (n == 128)


def test_the_command_takes_runs_of_any_name_and_nothing_else(tmp_path: Path) -> None:
    a = write_run(tmp_path / "[bold] a $x_", [1, 0])
    b = write_run(tmp_path / "b", [1, 1])
    assert call("compare", a, b) == 0
    assert call("compare", a, tmp_path / "nowhere") == 2
    assert call("compare", a, tmp_path) == 2
