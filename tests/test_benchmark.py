"""The benchmark measures what it says: the naive step is the same step, and rows, tables and charts
come out whole.
"""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

import benchmark
from benchmarks.memory import WAYS, Memory
from benchmarks.steps import LAYERS, NAIVE, PLAIN, Steps, _stacked
from benchmarks.workload import BenchStep, Workload, WorkloadFlags
from minigrpo.model.transformer import LogprobPacking, PackedTokens, Transformer
from minigrpo.runtime.flags import parse

TINY = [
    *(
        "--layers",
        "1",
        "--width",
        "16",
        "--heads",
        "2",
        "--vocab-size",
        "300",
        "--prompts-per-step",
        "2",
    ),
    *(
        "--group-size",
        "3",
        "--prompt-len",
        "9",
        "--max-new-tokens",
        "7",
        "--repeats",
        "1",
        "--device",
        "cpu",
    ),
]
CPU = torch.device("cpu")


def machine(work: Workload, naive: frozenset[str] = frozenset(), **flags: object) -> BenchStep:
    return BenchStep(work.config.replace(**{**PLAIN, "learning_rate": 1e-30, **flags}), work, naive)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"natural": True, "group_size": 4, "prompts_per_step": 2}])
def test_the_naive_step_is_the_same_step(options: dict[str, object]) -> None:
    """Same tokens, rewards and log-likelihood, and the same gradient, in float64."""
    asked = WorkloadFlags(**options) if options else parse(Steps, TINY)  # type: ignore[arg-type]
    work = Workload.of(asked, CPU)
    work.model.double()
    naive, ours = (
        machine(work, NAIVE),
        machine(
            work, packing="prefix-tree", speculative_decoding=True, skip_zero_variance_groups=True
        ),
    )
    for number in range(2):
        a, b = naive.step(number), ours.step(number)
        assert torch.equal(naive.tokens(), ours.tokens())
        assert naive.batch.rewards is not None and ours.batch.rewards is not None
        assert (naive.batch.rewards.total == ours.batch.rewards.total).all()
        assert a["completions"] == b["completions"] and a["completion_len"] == b["completion_len"]
        assert b["tokens/run"] < a["tokens/run"]
    if not work.natural:
        assert (naive.batch.completions.completion_mask.sum(-1) == 7).all()
    (loss, gradient), (other, theirs) = naive.gradient(naive.batch), ours.gradient(naive.batch)
    assert other == pytest.approx(loss, rel=1e-10)
    scale = max(g.abs().max() for g in gradient)
    assert scale > 0
    for x, y in zip(gradient, theirs, strict=True):
        assert (x - y).abs().max() <= 1e-9 * scale


def test_each_row_adds_one_layer_and_brackets_are_not_kept() -> None:
    rows = _stacked(CPU)
    assert [row.name.strip("()") for row in rows] == [layer.name for layer in LAYERS]
    kept = rows[0]
    for row in rows[1:]:
        if row.status != "ok":
            assert row.status == "needs cuda"
            continue
        added = {name for name in row.flags if row.flags[name] != kept.flags.get(name)}
        layer = next(layer for layer in LAYERS if layer.name == row.name.strip("()"))
        assert added == {
            name for name, value in layer.flags.items() if kept.flags.get(name) != value
        }
        if not row.name.startswith("("):
            kept = row
    assert not kept.naive


def test_the_steps_benchmark_writes_tables_charts_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    only = ["--only", "one batch", "tree", "TF32", "autocast", "lean"]
    benchmark.main(
        [*TINY, *only, "--full", "--out-dir", str(tmp_path / "out"), "--json", str(file)]
    )
    out = capsys.readouterr().out
    assert (
        "all rows sampled the same tokens" in out
        or "completions that are not the naive ones" in out
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "steps.md",
        "steps.json",
        "steps.png",
    }
    result = json.loads(file.read_text())
    rows = {row["name"].strip("()"): row for row in result["rows"]}
    assert result["rows"][0]["name"] == "naive" and result["rows"][0]["speedup"] == 1
    assert rows["TF32"]["status"] == "needs cuda" and rows["TF32"]["s_per_step"] is None
    assert (
        rows["tree packing"]["grad_difference"]
        < 1e-4
        < rows["bfloat16 autocast"]["grad_difference"]
    )
    assert (
        rows["tree packing"]["loss_difference"]
        < 1e-5
        < rows["bfloat16 autocast"]["loss_difference"]
        < 0.05
    )
    assert rows["tree packing"]["tokens_update"] < rows["naive"]["tokens_update"]
    for row in rows.values():
        if row["status"] == "ok":
            assert (
                row["s_per_step"] > 0 and row["roofline_multiple"] > 1 and len(row["samples"]) == 1
            )
    assert {row["name"] for row in result["alone"]} > {"naive", "plain"} - {"plain"}


def test_the_memory_benchmark_holds_all_ways_to_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.memory.logprobs_alone.__defaults__", (40, 300, 16))
    asked = parse(Memory, [*TINY, "--group-sizes", "2", "4", "--out-dir", str(tmp_path)])
    result = asked.run(Console(quiet=True))
    assert len(result["rows"]) == 2 * 2 * len(WAYS)
    assert all(
        row["status"] == "ok" and row["different_completions"] == 0 for row in result["rows"]
    )
    assert set(result["timelines"]) == set(WAYS)
    assert result["logprobs"]["gradient_difference"] < 1e-5
    assert (tmp_path / "memory.png").exists() and "stored once" in (
        tmp_path / "memory.md"
    ).read_text()


def test_running_out_of_memory_is_a_status_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row does not quietly run in smaller pieces than it says."""
    forward = Transformer.forward

    def small(
        self: Transformer, tokens: PackedTokens, packing: LogprobPacking, *args: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if len(packing.mask) > 1 and len(tokens.ids) < 70:  # the tree's, not the repeated packing's
            raise torch.OutOfMemoryError("out of memory")
        return forward(self, tokens, packing, *args)

    monkeypatch.setattr(Transformer, "forward", small)
    asked = parse(
        Steps,
        [*TINY, "--only", "completion-only", "tree", "one prompt", "--out-dir", str(tmp_path)],
    )
    result = asked.run(Console(quiet=True))
    assert [row["status"] for row in result["rows"]] == ["ok", "ok", "out of memory", "ok"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--vocab-size", "9"], "--vocab-size must be at least 257"),
        (["--natural", "--width", "64"], "--width goes with made-up work"),
        (["nonsense"], "NAME must be one of steps, memory, rewards, scaling"),
        (["--repats", "3"], "Unrecognized options: --repats"),
        (["--config", "/nowhere.toml"], "--config /nowhere.toml: cannot be read"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        benchmark.main(words)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1
