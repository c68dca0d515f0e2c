"""The benchmarks measure what they say: grpo.py's step and the library's are the same step, and
tables, charts and figures are complete.
"""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks import cli
from benchmarks.bench_step import BenchStep
from benchmarks.grpo_step import GrpoPyStep, from_columns, to_columns
from benchmarks.layers import GRPO_PY, LAYERS, PLAIN, stacked
from benchmarks.memory import WAYS, Memory
from benchmarks.steps import Steps
from benchmarks.workload import FIXED_BY_GRPO_PY, Workload, WorkloadFlags
from minigrpo.config import Config
from minigrpo.model.transformer import LogprobPacking, PackedTokens, Transformer
from minigrpo.runtime.flags import flag, parse

TINY_SIZES = {
    "layers": 1,
    "width": 16,
    "heads": 2,
    "vocab_size": 300,
    "prompts_per_step": 2,
    "group_size": 3,
    "prompt_len": 9,
    "max_new_tokens": 7,
}
TINY = [word for name, size in TINY_SIZES.items() for word in (flag(name), str(size))]
TINY += ["--repeats", "1", "--device", "cpu"]
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "options", [{}, {"natural": True, "group_size": 4, "prompts_per_step": 2, "kl_coef": 0.1}]
)
def test_the_step_of_grpo_py_is_the_librarys_step(options: dict[str, object]) -> None:
    """Same tokens, rewards and log-likelihood, and the same gradient, in float64."""
    flags = WorkloadFlags(**options) if options else parse(Steps, TINY)  # type: ignore[arg-type]
    work = Workload.of(flags, CPU)
    work.model.double()
    plain = {**PLAIN, "learning_rate": 1e-30}
    fast = plain | {
        "packing": "prefix-tree",
        "speculative_decoding": True,
        "skip_zero_variance_groups": True,
    }
    theirs = GrpoPyStep(work.config.replace(**plain), work)
    ours = BenchStep(work.config.replace(**fast), work)
    for number in range(2):
        a, b = theirs.step(number), ours.step(number)
        assert torch.equal(theirs.tokens(), ours.tokens())
        assert theirs.batch.rewards is not None and ours.batch.rewards is not None
        assert theirs.batch.rewards.total == pytest.approx(ours.batch.rewards.total, rel=1e-6)
        assert a["completions"] == b["completions"] and a["completion_len"] == b["completion_len"]
        assert b["tokens/run"] < a["tokens/run"]
    if not work.natural:
        assert (theirs.batch.completions.completion_mask.sum(-1) == 7).all()
    (loss, gradient), (other, others) = theirs.gradient(theirs.batch), ours.gradient(theirs.batch)
    assert other == pytest.approx(loss, rel=1e-10)
    scale = max(g.abs().max() for g in gradient)
    assert scale > 0
    for x, y in zip(gradient, others, strict=True):
        assert (x - y).abs().max() <= 1e-9 * scale


def test_micro_batches_of_grpo_py_add_up_to_the_same_gradient() -> None:
    work = Workload.of(parse(Steps, [*TINY, "--micro-batch-size", "0"]), CPU)
    work.model.double()
    config = work.config.replace(learning_rate=1e-30)
    whole = GrpoPyStep(config, work)
    parts = GrpoPyStep(config.replace(micro_batch_size=1), work)
    whole.step(0)
    for x, y in zip(whole.gradient(whole.batch)[1], parts.gradient(whole.batch)[1], strict=True):
        assert x.abs().max() > 0
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


def test_columns_begin_where_the_prompts_end() -> None:
    values, starts = torch.tensor([[1, 2], [3, 4]]), torch.tensor([2, 1])
    columns = to_columns(values, starts, 4)
    assert columns.tolist() == [[0, 0, 1, 2], [0, 3, 4, 0]]
    assert torch.equal(from_columns(columns, starts, 2), values)


def test_each_row_adds_one_layer_and_brackets_are_not_kept() -> None:
    rows = stacked(CPU)
    assert [row.name.strip("()") for row in rows] == [layer.name for layer in LAYERS]
    kept = rows[0]
    assert kept.is_grpo_py and not any(row.is_grpo_py for row in rows[1:])
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


def test_the_steps_benchmark_writes_tables_charts_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "figures.json", tmp_path / "out"
    only = ["--only", "no speed", "tree", "TF32", "autocast", "lean"]
    cli.main([*TINY, *only, "--full", "--out-dir", str(out), "--json", str(file)])
    printed = capsys.readouterr().out
    assert "all rows sampled the same tokens" in printed or "completions that differ" in printed
    assert {path.name for path in out.iterdir()} == {"steps.md", "steps.json", "steps.png"}
    result = json.loads(file.read_text())
    rows = {row["name"].strip("()"): row for row in result["rows"]}
    assert result["rows"][0]["name"] == GRPO_PY and result["rows"][0]["speedup"] == 1
    assert rows["TF32"]["status"] == "needs cuda" and rows["TF32"]["s_per_step"] is None
    tree, autocast = rows["prefix-tree packing"], rows["bfloat16 autocast"]
    assert tree["grad_difference"] < 1e-4 < autocast["grad_difference"]
    assert tree["loss_difference"] < 1e-5 < autocast["loss_difference"] < 0.05
    assert tree["tokens_update"] < rows[GRPO_PY]["tokens_update"]
    for row in rows.values():
        if row["status"] == "ok":
            assert row["s_per_step"] > 0 and row["roofline_multiple"] > 1
            assert len(row["samples"]) == 1
    assert {row["name"] for row in result["alone"]} > {GRPO_PY, "the library, no speed layers"}


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
        Steps, [*TINY, "--only", "no speed", "tree", "one prompt", "--out-dir", str(tmp_path)]
    )
    result = asked.run(Console(quiet=True))
    assert [row["status"] for row in result["rows"]] == ["ok", "ok", "out of memory", "ok"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--vocab-size", "9"], "--vocab-size must be at least 257"),
        (["--natural", "--width", "64"], "--width goes with made-up work"),
        (["nonsense"], "NAME must be one of steps, memory, plan, rewards"),
        (["--repats", "3"], "Unrecognized options: --repats"),
        (["--config", "/nowhere.toml"], "--config /nowhere.toml: cannot be read"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("setting", ["temperature = 0.8", 'loss = "dapo"', "num_iterations = 2"])
def test_a_job_that_grpo_py_cannot_do_is_refused(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(setting + "\n")
    with pytest.raises(ValueError, match=r"--(temperature|loss|num-iterations) must be .*grpo\.py"):
        Workload.of(WorkloadFlags(config=file), CPU)
    assert set(FIXED_BY_GRPO_PY) <= set(Config().flat())
