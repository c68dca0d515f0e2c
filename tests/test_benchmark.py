"""The benchmarks measure what they say: grpo.py's step and the library's are the same step, and
tables, charts and figures are complete.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import cli, layers, probe
from benchmarks.bench_step import BenchStep
from benchmarks.grpo_step import GrpoPyStep, from_columns, to_columns
from benchmarks.intervals import gain, median_of
from benchmarks.layers import (
    AS_CONFIGURED,
    GRPO_PY,
    IN_BATCHES,
    LAYERS,
    NO_LAYERS,
    PLAIN,
    RowSpec,
    alone,
    stacked,
)
from benchmarks.length import BATCHES, CONTINUOUS, FORCED, fit
from benchmarks.memory import WAYS, Memory
from benchmarks.profile import ATTENTION, MOVES, OTHERS, PRODUCTS, SHARES, kind_of
from benchmarks.report import remarks
from benchmarks.rows import Comparisons, Row
from benchmarks.scaling import Scaling
from benchmarks.steps import Steps
from benchmarks.workload import FIXED_BY_GRPO_PY, Workload, WorkloadFlags
from minigrpo.config import Config
from minigrpo.model.packing import PACKINGS
from minigrpo.model.transformer import LogprobPacking, PackedTokens, Transformer
from minigrpo.runtime import no_effect
from minigrpo.runtime.flags import flag, parse
from minigrpo.tools.cli import main as minigrpo_main

from .pretend import pretend_cuda

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
LENGTH_ROWS = (FORCED, BATCHES, CONTINUOUS)
TOO_FEW = "too few turns for an interval"
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


def job(*words: str, device: str = "cpu", **settings: object) -> Workload:
    """A tiny job with other settings, as if it ran on another device."""
    work = Workload.of(parse(Steps, [*TINY, *words]), CPU)
    return replace(work, config=work.config.replace(**settings), device=torch.device(device))


def test_each_row_adds_one_layer_and_brackets_are_not_kept() -> None:
    rows = stacked(job("--prompts-per-step", "8", kl_coef=0.0))
    assert [row.name.strip("()") for row in rows] == [layer.name for layer in LAYERS]
    assert rows[0].is_grpo_py and not any(row.is_grpo_py for row in rows[1:])
    kept = PLAIN  # the flags of the rows above whose layers are kept
    for row, layer in zip(rows, LAYERS, strict=True):
        assert row.flags == {**kept, **layer.flags}
        assert (row.status == "nothing to do: needs CUDA") == layer.needs_cuda
        if not row.name.startswith("(") and not layer.needs_cuda:
            kept = row.flags
    assert [row.name for row in rows if row.is_default] == ["prefix-tree packing"]


@pytest.mark.parametrize(
    ("device", "settings", "name", "idle"),
    [
        ("cpu", {}, "TF32", True),
        ("cpu", {}, "(CUDA graphs)", True),
        ("cpu", {}, "zero-variance groups skipped", True),
        ("cpu", {"kl_coef": 0.0}, "zero-variance groups skipped", False),
        ("cpu", {}, "(offloaded reference)", True),
        ("cuda", {}, "(offloaded reference)", False),
        ("cuda", {"kl_coef": 0.0}, "(offloaded reference)", True),
        ("cpu", {}, "(chunked log-probs)", True),
        ("cpu", {"group_size": 256}, "(chunked log-probs)", False),
        ("cpu", {"prompts_per_step": 1}, f"({IN_BATCHES})", True),
        ("cpu", {"prompts_per_step": 6}, f"({IN_BATCHES})", False),
        ("cpu", {"prompts_per_step": 1, "kl_coef": 0.0}, "(the same with overlapped", True),
        ("cpu", {}, "(the same with overlapped", False),
        ("cpu", {}, "(gradient checkpointing)", False),
    ],
)
def test_a_layer_that_changes_nothing_on_a_job_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, device: str, settings: dict[str, float], name: str, idle: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    work = job("--kl-coef", "0.1", device=device, **settings)
    status = next(row.status for row in stacked(work) if name in row.name)
    assert status.startswith(layers.NOTHING_TO_DO) if idle else status == "ok"
    assert status != layers.NOTHING_TO_DO  # it says why


def test_tf32_has_nothing_to_do_on_an_old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for capability in ((7, 0), (8, 0)):
        monkeypatch.setattr(no_effect, "cuda_capability", lambda _, c=capability: c)
        rows = stacked(job(device="cuda"))
        found.append(next(row.status for row in rows if row.name == "TF32"))
    assert found[0].startswith(layers.NOTHING_TO_DO) and found[1] == "ok"


def test_a_row_says_that_its_compiler_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    (status,) = (row.status for row in stacked(job()) if row.name == "(torch.compile)")
    assert status.startswith("--compile-model needs a C++ compiler")


def test_a_layer_alone_is_compared_with_the_library_without_layers() -> None:
    rows = {row.name: row for row in alone(job())}
    assert rows[NO_LAYERS].over == GRPO_PY and rows["fused AdamW"].over == NO_LAYERS
    assert rows["the same with overlapped rewards"].status.startswith(layers.NOTHING_TO_DO)


def test_the_defaults_have_a_row_whatever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    other = {**layers.DEFAULT_FLAGS, "gradient_checkpointing": True, "use_amp": True}
    monkeypatch.setattr(layers, "DEFAULT_FLAGS", other)
    assert [row.name for row in stacked(job()) if row.is_default] == [layers.DEFAULTS]


def test_a_config_has_a_row_with_its_own_flags(tmp_path: Path) -> None:
    first, second = tmp_path / "job.toml", tmp_path / "hardware.toml"
    first.write_text("[sampling]\nprompts_per_step = 2\n[memory]\nmicro_batch_size = 1\n")
    second.write_text('[speed]\npacking = "shared-prompt"\nuse_amp = true\n')
    flags = parse(Steps, ["--config", str(first), "--config", str(second)])
    work = Workload.of(flags, CPU)
    assert work.config.sampling.prompts_per_step == 2
    *_, row = stacked(work, as_configured=True)
    changed = {name for name, x in row.flags.items() if x != layers.DEFAULT_FLAGS[name]}
    assert row.name == AS_CONFIGURED and row.over == "prefix-tree packing"
    assert changed == {"packing", "use_amp"} and not row.is_default
    assert flags.command() == f"python benchmark.py steps --config {first} --config {second}"


def timed(name: str, seconds: list[float], over: str = "") -> Row:
    row = Row(RowSpec(name, PLAIN, over=over), "ok")
    row.steps = {turn: {"seconds": x} for turn, x in enumerate(seconds, start=1)}
    return row


def test_a_median_has_the_interval_of_the_binomial_distribution() -> None:
    """k is the largest with 2 P(Binomial(n, 1/2) < k) <= 0.05; any table of the sign test."""
    expected = {6: (1, 6), 8: (1, 8), 9: (2, 8), 12: (3, 10), 17: (5, 13), 25: (8, 18)}
    for n, ends in expected.items():
        assert median_of([float(x) for x in range(n, 0, -1)]).ends == ends
    assert median_of([1.0, 2.0, 3.0, 4.0, 5.0]).ends is None


@pytest.mark.parametrize(
    ("before", "now", "verdict"),
    [
        ([1.0, 3.0, 1.0, 3.0, 1.0, 3.0], [0.5, 1.5, 0.5, 1.5, 0.5, 1.5], "2.00x (2.00-2.00)"),
        ([1.0] * 6, [1.25] * 6, "slower: 0.80x (0.80-0.80)"),
        ([1.0] * 6, [0.5, 0.6, 0.7, 0.8, 0.9, 1.01], "no difference (0.99-2.00x)"),
        ([1.0] * 6, [0.995] * 6, "no difference (1.01-1.01x)"),
        ([1.0] * 5, [0.5] * 5, f"2.00x; {TOO_FEW}"),
    ],
)
def test_a_difference_within_the_spread_is_called_none(
    before: list[float], now: list[float], verdict: str
) -> None:
    found = gain(timed("a", before).seconds, timed("b", now).seconds)
    assert found and found.verdict() == verdict


def test_only_rows_with_a_wide_interval_take_more_turns() -> None:
    steady, wide = [1.0] * 6, [1.0, 1.0, 1.0, 1.1, 1.1, 1.1]
    rows = [timed("a", steady), timed("b", steady, "a"), timed("c", wide, "b")]
    compared = Comparisons(rows, [row.spec for row in rows])
    asked, soon = Steps(repeats=6, max_repeats=7), time.perf_counter() + 60
    assert asked._due(rows, 7, compared, soon) == rows[1:]  # c, and the row it is compared with
    assert asked._due(rows, 6, compared, soon) == rows
    assert asked._due(rows, 8, compared, soon) == []
    assert asked._due(rows, 7, compared, time.perf_counter() - 1) == []
    assert asked._due(rows[2:], 7, compared, soon) == []  # b is over, so a turn has no partner
    rows[1].steps[7] = {"seconds": 1.0}
    assert asked._due(rows[2:], 7, compared, soon) == rows[2:]


def test_a_row_is_compared_with_the_nearest_one_that_ran() -> None:
    rows = [timed("a", [4.0] * 6), timed("b", [2.0] * 6, "a"), timed("c", [1.0] * 6, "b")]
    rows[1].status = "out of memory"
    found = Comparisons(rows, [row.spec for row in rows]).gain(rows[2])
    assert found and found.middle == 4


def figures(name: str, seconds: list[float], different: int = 0, default: bool = False) -> Any:
    found, first = median_of(seconds), median_of([8.0 / x for x in seconds])
    return {
        "name": name,
        "is_default": default,
        "s_per_step": found.middle,
        "samples": seconds,
        "turns": list(range(6)),
        "speedup": first.middle,
        "speedup_interval": first.ends,
        "flops_multiple": 2.0,
        "completions": 9,
        "different_completions": different,
        "memory_measures": "growth",
    }


def test_the_summary_names_the_defaults_first_and_never_a_row_that_changes_completions() -> None:
    rows = [
        figures(GRPO_PY, [8.0] * 6),
        figures("tree", [2.0] * 6, default=True),
        figures("compiled", [1.6, 1.9, 1.9, 2.0, 2.1, 2.1]),
        figures("bfloat16", [1.0] * 6, different=3),
    ]
    first, second, third, *_ = remarks(rows)
    assert first.startswith(f"{layers.DEFAULTS}: 4.0x as fast as grpo.py (4.0-4.0x)")
    assert "compiled" in second and second.endswith("no difference (0.95-1.25x)")
    assert third == "3 of 9 completions differ from those of grpo.py: bfloat16"
    # what the library changes by rounding is no reason to leave out its rows
    rounded = [rows[0], figures(layers.NO_LAYERS, [4.0] * 6, different=1)]
    rounded += [{**row, "different_completions": 1} for row in rows[1:3]] + rows[3:]
    assert remarks(rounded)[1].startswith(
        "fastest row that changes no completion beyond rounding: compiled"
    )


def test_the_steps_benchmark_writes_tables_charts_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "figures.json", tmp_path / "out"
    only = ["--only", "no speed", "tree", "TF32", "autocast", "lean", "offloaded"]
    cli.main([*TINY, *only, "--full", "--out-dir", str(out), "--json", str(file)])
    printed = capsys.readouterr().out
    assert f"{layers.DEFAULTS}: " in printed and TOO_FEW in printed
    text = (out / "steps.md").read_text()
    assert f"Made by `python benchmark.py steps --device cpu {' '.join(TINY[:4])}" in text
    assert {path.name for path in out.iterdir()} == {"steps.md", "steps.json", "steps.png"}
    result = json.loads(file.read_text())
    rows = {row["name"].strip("()"): row for row in result["rows"]}
    assert result["rows"][0]["name"] == GRPO_PY and result["rows"][0]["speedup"] == 1
    assert rows["TF32"]["status"] == rows["TF32"]["verdict"] == "nothing to do: needs CUDA"
    assert rows["TF32"]["s_per_step"] is rows["offloaded reference"]["s_per_step"] is None
    assert [name for name, row in rows.items() if row["is_default"]] == ["prefix-tree packing"]
    tree, autocast = rows["prefix-tree packing"], rows["bfloat16 autocast"]
    assert tree["grad_difference"] < 1e-4 < autocast["grad_difference"]
    assert tree["loss_difference"] < 1e-5 < autocast["loss_difference"] < 0.05
    assert tree["tokens_update"] < rows[GRPO_PY]["tokens_update"]
    for row in rows.values():
        if row["status"] == "ok":
            assert row["s_per_step"] > 0 and row["roofline_multiple"] > 1
            assert len(row["samples"]) == 1
    assert [row["name"] for row in result["alone"]] == [
        row["name"].strip("()") for row in result["rows"]
    ]


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
        (["nonsense"], "minigrpo benchmark [NAME]: NAME must be one of steps, memory, plan"),
        (["--prompt-len", "0"], "--prompt-len must be at least 1, got 0"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        ([*TINY, "--only", "tree", "nope"], "--only 'nope': no row has this in its name; rows: gr"),
        (["memory", "--group-sizes"], "--group-sizes needs at least one value"),
        (["memory", "--group-sizes", "1"], "--group-sizes must be at least 2, got 1"),
        (["rewards", "--sizes", "12"], "--sizes must be multiples of 8, got 12"),
        (["scaling", "--processes", "1", "-3"], "--processes must be at least 1, got -3"),
        (["scaling", "--processes", "3"], "--prompts-per-step 16 does not divide among 3"),
        (["scaling", "--steps", "3"], "--steps must be at least 4, got 3"),
        (["scaling", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["scaling", "--config", "nope"], "--config nope: no such file or preset; presets: "),
        (["length", "--lengths", "4"], "--lengths must be at least 8, got 4"),
        (["length", "--width", "16"], "--width must be at least 32, got 16"),
        (["--json", "/"], "--json must name a file, got '/'"),
        (["--json", "/proc/nope/x.json"], "--json /proc/nope/x.json: cannot be written"),
        (["memory", "--out-dir", "/proc/nope"], "--out-dir /proc/nope: cannot be written"),
        (["--repats", "3"], "Unrecognized options: --repats"),
        (["--config", "/nowhere.toml"], "--config /nowhere.toml: cannot be read"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words, prog="minigrpo benchmark")
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1


def test_length_measures_forced_and_ragged_completions(tmp_path: Path) -> None:
    file, small = tmp_path / "length.json", {"layers": 1, "width": 32, "group_size": 2}
    sizes = {**small, "prompts_at_once": 2, "prompt_len": 9, "vocab_size": 64}
    words = [word for name, size in sizes.items() for word in (flag(name), str(size))]
    cli.main(["length", "--lengths", "16", "32", *words, "--device", "cpu", "--json", str(file)])
    found = json.loads(file.read_text())
    rows = {(row["length"], row["name"]): row for row in found["rows"]}
    assert [length for length, _ in rows] == [16] * 3 + [32] * 3
    for length in (16, 32):
        forced, batches, continuous = (rows[length, name] for name in LENGTH_ROWS)
        assert forced["tokens"] == 4 * length and forced["rounds"] == length - 1
        assert forced["keys_per_token"] == 9 + (length - 1) / 2
        assert batches["tokens"] == continuous["tokens"] < 3 * forced["tokens"]
        assert continuous["rounds"] < batches["rounds"]
    assert found["made_by"].startswith("Made by `python benchmark.py length --lengths 16 32 ")


def test_a_line_is_fitted_through_the_time_per_token() -> None:
    rows = [{"keys_per_token": keys, "us_per_token": 5 + 0.5 * keys} for keys in (10, 20, 40)]
    line = fit(rows)
    assert (line["fixed"], line["per_key"]) == pytest.approx((5, 0.5))
    assert line["deviation"] == pytest.approx(0, abs=1e-12)
    rows[1]["us_per_token"] *= 1.5
    assert fit(rows)["deviation"] > 0.1
    assert fit(rows[:1])["fixed"] == rows[0]["us_per_token"]


@pytest.mark.parametrize("setting", ["temperature = 0.8", 'loss = "dapo"', "num_iterations = 2"])
def test_a_job_that_grpo_py_cannot_do_is_refused(tmp_path: Path, setting: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(setting + "\n")
    with pytest.raises(ValueError, match=r"--(temperature|loss|num-iterations) must be .*grpo\.py"):
        Workload.of(WorkloadFlags(config=(str(file),)), CPU)
    assert set(FIXED_BY_GRPO_PY) <= set(Config().flat())


def test_the_program_is_named_as_it_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    for run in (lambda: minigrpo_main(["benchmark", "no"]), lambda: cli.main(["no"])):
        with pytest.raises(SystemExit):
            run()
    said = [line.partition(" [NAME]")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == ["error: minigrpo benchmark", "error: python benchmark.py"]


def test_scaling_starts_any_job_by_module_so_that_a_wheel_can_too(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text("[sampling]\ngroup_size = 2\n")
    asked = parse(Scaling, ["--config", "chess-long", "--config", str(file), "--steps", "7"])
    words = asked._command(2, tmp_path / "run")
    module = words.index("minigrpo.tools.train")
    assert words[module - 1] == "-m" and words[2] == "torch.distributed.run"
    config = Config.from_cli(words[module + 1 :])
    assert (config.run.max_steps, config.sampling.group_size) == (7, 2)


@pytest.mark.slow
def test_scaling_measures_a_job_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text("[sampling]\nprompts_per_step = 2\ngroup_size = 2\n")
    words = ["scaling", "--config", "job.toml", "--steps", "10", "--json", "new/figures.json"]
    cli.main([*words, "--processes", "2", "1"])
    two, one = json.loads(Path("new/figures.json").read_text())["rows"]
    assert (two["processes"], one["processes"]) == (2, 1) and two["efficiency"] == 1
    assert one["efficiency"] == pytest.approx(2 * two["s/step"] / one["s/step"])
    low, high = one["95 % interval"]
    assert low <= one["s/step"] <= high and one["rollout"] + one["update"] < high
    Path("job.toml").write_text('[task]\nname = "missing.py"\n')
    with pytest.raises(SystemExit):
        cli.main(["scaling", "--config", "job.toml", "--processes", "1"])
    assert "missing.py" in capsys.readouterr().err.splitlines()[-1]


def test_gap_measures_each_precision_with_each_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text("prompts_per_step = 2\ngroup_size = 3\nmax_new_tokens = 24\n")
    before = Path("job.toml").read_text()
    with pytest.raises(SystemExit):  # its own input
        cli.main(["gap", "--config", "job.toml", "--steps", "2", "--json", "job.toml"])
    assert Path("job.toml").read_text() == before
    cli.main(["gap", "--config", "job.toml", "--steps", "2", "--json", "gap.json"])
    rows = json.loads(Path("gap.json").read_text())["rows"]
    assert len(rows) == 9 and all(0 <= row["mean"] <= row["max"] for row in rows)
    found = {(row.pop("precision"), row.pop("packing")): row for row in rows}
    for packing in PACKINGS:
        exact, low = found["float32", packing], found["bfloat16", packing]
        assert 0 < exact["max"] < 1e-4 and exact["off"] == 0
        assert low["max"] < 0.5 and low["tokens"] >= 2 * 2 * 3
        assert low == found["bfloat16, weights too", packing]  # they are cast alike, only earlier
    assert not list(tmp_path.glob("runs*"))


def test_groups_run_the_same_completions_with_each_packing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["--group-sizes", "2", "4", "--prompts", "2", "--repeats", "1", "--json", "groups.json"]
    cli.main(["groups", "--tasks", "hidden-digit", *sizes])
    rows = json.loads(Path("groups.json").read_text())["rows"]
    assert [row["group_size"] for row in rows] == [2, 2, 2, 4, 4, 4]
    for group in rows[:3], rows[3:]:
        tokens = {row["packing"]: row["tokens"] for row in group}
        assert tokens["repeated"] > tokens["shared-prompt"] >= tokens["prefix-tree"] > 0
        assert all(row["share"] == row["tokens"] / tokens["repeated"] for row in group)
        assert group[0]["verdict"] == "" and "x" in group[2]["verdict"]
    assert rows[3]["tokens"] > rows[0]["tokens"]
    assert not list(tmp_path.glob("runs*"))


def test_rollouts_are_the_same_with_and_without_speculative_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.main(["rollouts", "--tasks", "hidden-digit", "--turns", "1", "--json", "rollouts.json"])
    without, speculative = json.loads(Path("rollouts.json").read_text())["rows"]
    assert without["length"] == speculative["length"] > 1
    assert speculative["rounds_each"] < without["rounds_each"]
    assert speculative["tokens"] < without["tokens"]
    assert without["verdict"] == "" and "x" in speculative["verdict"]
    assert not list(tmp_path.glob("runs*"))


def test_the_shares_of_a_profile_make_up_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.main(["profile", "--tasks", "hidden-digit", "--steps", "1", "--json", "profile.json"])
    rows = json.loads(Path("profile.json").read_text())["rows"]
    assert [row["phase"] for row in rows] == ["rollout", "update"]
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=0.05)
    for row in rows:
        shares = [row[kind] for _, kind, _ in SHARES]
        assert sum(shares) == pytest.approx(1) and min(shares) > 0
    assert not list(tmp_path.glob("runs*"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten::mm", PRODUCTS),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION),
        ("aten::_index_put_impl_", MOVES),
        ("aten::silu_backward", OTHERS),
    ],
)
def test_the_kind_of_an_operation(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_rows_run_one_after_the_other_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the pretended device: models and batches are on it, and each row frees it for the next."""
    freed = list[None]()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(None))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(probe, "matmul_rate", lambda *args: 1e12)
    monkeypatch.setattr(probe, "bandwidth", lambda *args: 1e11)
    words = [*TINY, "--device", "cuda"]
    only = ["--only", "no speed", "tree", "TF32"]  # below these, bfloat16 is kept
    with pretend_cuda(monkeypatch):
        asked = parse(Steps, [*words, *only, "--out-dir", str(tmp_path)])
        result = asked.run(Console(quiet=True))
    assert [(row["name"], row["status"]) for row in result["rows"]] == [
        (GRPO_PY, "ok"),
        (NO_LAYERS, "ok"),
        ("prefix-tree packing", "ok"),
        ("TF32", "ok"),
    ]
    assert len(freed) == len(result["rows"])
    for row in result["rows"]:
        assert row["peak_mib"] == 1 and row["memory_measures"] == "allocated on the GPU"
        assert len(row["samples"]) == 1 and row["speedup"]
        assert row["different_completions"] == 0 and row["grad_difference"] < 1e-4
