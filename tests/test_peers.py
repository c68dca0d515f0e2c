"""`benchmark.py peers`: rows take turns and report failures; with TRL (-m peer) the whole command
runs, and TRL's gradient on the same completions is ours.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cli, peers
from benchmarks.bench_step import BenchStep
from benchmarks.peer_jobs import JOBS, WAYS, as_it_is, candidates, least_memory
from benchmarks.peer_rows import KILLED, Row, record, take_turns
from benchmarks.workload import QWEN, Workload, WorkloadFlags
from minigrpo.model.families import FAMILIES
from minigrpo.model.weights import export_model
from minigrpo.runtime.logging import Screen

SMALL_QWEN = {"layers": 2, "width": 28, "vocab_size": 300, "prompt_len": 6}
WORKER = """
import json, os, sys
asked = json.loads(sys.stdin.readline())
log = open(asked["log"], "a", buffering=1)
print(json.dumps({"work": "made up"}), flush=True)
for line in sys.stdin:
    log.write(asked["flags"]["name"] + " " + line)
    if line == "finish\\n":
        end = {"peak_mib": 1.0, "process_mib": 2.0, "memory_measures": "growth"}
        ends = {"held_out_before": [1.0, 2.0], "held_out_after": [1.5, 2.3]}
        print(json.dumps(end | ends), flush=True)
    elif asked["flags"]["name"] == "is killed":
        print("a warning", file=sys.stderr, flush=True)
        os.kill(os.getpid(), 9)
    elif asked["flags"]["name"] == "dies":
        raise RuntimeError("no memory left")
    else:
        seconds = asked["flags"]["seconds"]
        step = {"seconds": seconds, "completion_tokens": 9.0, "reward": 0.5, "tokens/run": 20.0}
        print(json.dumps(step), flush=True)
"""


def test_rows_take_turns_and_one_that_dies_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made_up_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = {"a": 2.0, "dies": 1.0, "b": 3.0, "is killed": 1.0, "left out": 1.0}
    rows = [
        Row(name, flags={"name": name, "seconds": seconds}, module="made_up_worker")
        for name, seconds in names.items()
    ]
    rows[-1].status = "failed before"
    log, steps = tmp_path / "log", 1 + 6
    asked = {"steps": steps, "log": str(log)}
    take_turns(rows, asked, Screen(quiet=True), "made up", warm_up=1)
    said = [line for line in log.read_text().splitlines() if line[0] in "ab"]
    assert said == ["a step", "b step"] * steps + ["a finish", "b finish"]
    assert [row.process.poll() is not None for row in rows if row.process] == [True] * 4

    first, dead, other, killed, left_out = (record(row, rows[0]) for row in rows)
    assert dead["status"] == "RuntimeError: no memory left" and "s_per_step" not in dead
    assert killed["status"] == KILLED and left_out["status"] == "failed before"
    assert first["s_per_step"] == 2 and other["s_per_step_interval"] == (3, 3)
    assert other["multiple"] == 1.5 and len(other["samples"]) == steps
    assert other["held_out_after"] == pytest.approx(1.9)
    assert other["change"] == "+0.400 ± 0.100"
    json.dumps([first, dead, other, killed, left_out], allow_nan=False)


@pytest.mark.parametrize("completions", [4, 64, 256])
def test_every_way_to_run_trl_makes_one_optimizer_step_per_rollout(completions: int) -> None:
    for way in WAYS.values():
        tried = [*candidates(way, completions), least_memory(way, completions)]
        for settings in (as_it_is(completions), *tried):
            size = settings["per_device_train_batch_size"]
            assert size * settings["gradient_accumulation_steps"] == completions
        assert [settings["gradient_checkpointing"] for settings in tried] == [False, False, True]
    assert as_it_is(256)["per_device_train_batch_size"] == 8


def test_trl_has_the_fastest_settings_or_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With checkpointing only if nothing else runs; a row that cannot run is not started."""
    fits = {"float32": 2, "bfloat16": 0, "checkpointing": 0}  # completions in a micro-batch
    ran = []

    def pretend(rows: Any, asked: Any, screen: Any, title: str, *, warm_up: int) -> None:
        for row in (row for row in rows if row.status == "ok"):
            ran.append((row.name, asked["steps"], asked["held_out"]))
            settings = row.settings or {}
            kind = "bfloat16" if settings.get("bf16") else "float32"
            size = settings.get("per_device_train_batch_size", 0)
            row.warm_up = warm_up
            if size > fits["checkpointing" if settings.get("gradient_checkpointing") else kind]:
                row.status = KILLED
                continue
            step = {"seconds": 1.0 + size, "completion_tokens": 9.0, "reward": 0, "tokens/run": 2}
            row.steps = [step] * asked["steps"]
            row.end = {"peak_mib": 1.0, "process_mib": 2.0, "memory_measures": "growth"}
            row.end |= {"held_out_before": [], "held_out_after": []}

    make_small(monkeypatch)
    monkeypatch.setattr(peers, "take_turns", pretend)
    monkeypatch.setattr(peers, "find_spec", lambda name: "there")
    monkeypatch.setattr(peers, "version", lambda name: "1")
    words = ["--jobs", QWEN, "--ways", "float32", "bfloat16", "--device", "cpu"]
    cli.main(["peers", *words, "--out-dir", str(tmp_path)])
    (found,) = json.loads((tmp_path / "peers.json").read_text())["jobs"]
    sizes = [x["settings"]["per_device_train_batch_size"] for x in found["tried"]]
    assert sizes == [8, 2, 8, 2, 1]  # for bfloat16, with checkpointing at last
    assert found["best"]["float32"]["per_device_train_batch_size"] == 2
    assert [*found["best"]] == ["float32"]
    assert [x["seconds"] for x in found["tried"]] == [None, 3, None, None, None]
    ours, theirs, ours_low, theirs_low = found["rows"]
    assert ours["status"] == theirs["status"] == ours_low["status"] == "ok"
    assert theirs["multiple"] == 3 and len(theirs["samples"]) == 4
    assert theirs_low["status"].startswith(f"{KILLED} (tried: per_device_train_batch_size=8")
    assert theirs_low["status"].count("gradient_checkpointing=True") == 1
    assert ran[5:] == [
        (f"{side}, {way}", 4, 0)
        for side, way in (("minigrpo", "float32"), ("TRL", "float32"), ("minigrpo", "bfloat16"))
    ]
    assert "tried: per_device" in (tmp_path / "peers.md").read_text()


@pytest.mark.parametrize(
    ("words", "there", "said"),
    [
        ([], False, "install the extra with pip install -e '.[peer]'"),
        (["--steps", "2"], True, "--steps must be at least 3, got 2"),
        (["--jobs", "checkers"], True, "checkers"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    there: bool,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: "there" if there else None)
    with pytest.raises(SystemExit) as stop:
        cli.main(["peers", *words])
    err = capsys.readouterr().err
    assert stop.value.code == 2 and said in err and len(err.splitlines()) == 1


# --- with TRL -------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("job", ["chess", "forced", QWEN])
def test_on_the_same_completions_the_gradient_of_trl_is_ours(tmp_path: Path, job: str) -> None:
    """Loss, normalisation, rewards, advantages and (forced) the KL term are the same."""
    pytest.importorskip("trl")
    from benchmarks import peer_trl

    forced = job != "chess"
    sizes: dict[str, Any] = {"prompts_per_step": 3, "group_size": 4, "max_new_tokens": 70}
    sizes |= SMALL_QWEN if job == QWEN else {}
    flags = WorkloadFlags(**{**JOBS[job].workload, **sizes, "device": "cpu"})
    work = Workload.of(flags, torch.device("cpu"))
    config = work.config.replace(max_steps=350)
    ours = BenchStep(config, work)
    batch = ours.source.batch(0)
    assert batch.rewards is not None and batch.rewards.total.std() > 0
    if forced:  # a policy that has moved from its reference, so that the KL term has a gradient
        with torch.no_grad():
            for p in work.model.parameters():
                p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        reference = ours.source.reference
        ours = BenchStep(config, work)
        ours.source.reference = reference
        batch = ours.source.batch(0)
    kl = 0.0
    gradient = ours.gradient(batch)[1]
    scale = math.sqrt(sum(float(g.square().sum()) for g in gradient))
    names = [name for name, _ in ours.model.named_parameters()]
    family = FAMILIES[work.shape.family]
    clipped = [g / max(1.0, scale) for g in gradient]
    expected = {
        family.theirs(name): g.t() if name.endswith(family.transposed) else g
        for name, g in zip(names, clipped, strict=True)
    }

    settings = candidates(WAYS["float32"], 12)[-1]
    work.save_model(tmp_path)
    trainer, last = peer_trl.make_trainer(
        work, config, settings, steps=1, folder=tmp_path, begin=lambda: None, end=lambda: None
    )
    if forced:
        reference_weights = reference.model.state_dict()
        folder = tmp_path / "reference"
        export_model(reference_weights, folder, shape=work.shape, eos=0)
        kl = config.loss.kl_coef
        assert trainer.beta == kl > 0
        trainer.ref_model.load_state_dict(
            type(trainer.ref_model).from_pretrained(folder).state_dict()
        )
    compare_gradients(trainer, batch, {family.prefix + name: g for name, g in expected.items()})
    assert last.rewards == pytest.approx(batch.rewards.total.flatten().tolist())


@pytest.mark.peer
def test_adapters_have_the_gradient_of_trl_with_peft(tmp_path: Path) -> None:
    """The reference of the KL term is the model without its adapters."""
    pytest.importorskip("trl")
    from benchmarks import peer_trl

    sizes: dict[str, Any] = {**SMALL_QWEN, "prompts_per_step": 3, "max_new_tokens": 20}
    flags = WorkloadFlags(preset=QWEN, device="cpu", **sizes)
    work, way = Workload.of(flags, torch.device("cpu")), WAYS["lora-float32"]
    config = work.config.replace(**way.flags, max_steps=350)
    ours = BenchStep(config, work)
    trained = {name: p for name, p in ours.model.named_parameters() if p.requires_grad}
    with torch.no_grad():  # adapters start at 0, where the first of each pair has no gradient
        for p in trained.values():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    batch = ours.source.batch(0)
    ours.learner.gradient(*ours.learner.prepare(batch))
    theirs = FAMILIES[work.shape.family].theirs
    names = {name: f"base_model.model.{theirs(name)}.default.weight" for name in trained}
    gradient = {name: p.grad for name, p in trained.items() if p.grad is not None}
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
    expected = {names[name]: g / max(1.0, norm) for name, g in gradient.items()}
    assert len(expected) == 2 * 7 * 2  # two matrices for each of seven layers of two blocks

    settings = candidates(way, 12)[-1]
    work.save_model(tmp_path)
    trainer, _ = peer_trl.make_trainer(
        work, config, settings, steps=1, folder=tmp_path, begin=lambda: None, end=lambda: None
    )
    assert trainer.ref_model is None and trainer.beta == config.loss.kl_coef > 0
    with torch.no_grad():
        for name, p in trained.items():
            trainer.model.get_parameter(names[name]).copy_(p)
    compare_gradients(trainer, batch, expected)


def compare_gradients(trainer: Any, batch: Any, expected: dict[str, torch.Tensor]) -> None:
    """Train a step on a batch's completions; TRL's clipped gradient must be what is expected."""
    from benchmarks import peer_trl

    mask, ids = batch.completions.completion_mask, batch.completions.completion_ids
    prompts, group = mask.shape[:2]
    same = [ids[p, g][mask[p, g]].tolist() for p in range(prompts) for g in range(group)]
    trainer._generate_single_turn = lambda *args, **kwargs: (same, None)
    found: dict[str, Any] = {}

    class Spy(peer_trl.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_pre_optimizer_step(self, *args: Any, model: Any, **kwargs: Any) -> None:
            for name, p in model.named_parameters():
                if p.grad is not None:
                    found[name] = p.grad.clone()

    trainer.add_callback(Spy())
    trainer.train()
    assert found.keys() == expected.keys()
    largest = max(g.abs().max() for g in expected.values())
    for name, g in expected.items():
        assert (found[name] - g).abs().max() <= 1e-4 * largest, name


@pytest.mark.peer
def test_the_whole_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl")
    monkeypatch.setattr(peers, "candidates", lambda way, number: candidates(way, number)[:1])
    make_small(monkeypatch, held_out=8, as_it_is=True, at_once=2)
    sizes = ["--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "6"]
    words = ["--jobs", QWEN, "--ways", "lora-bfloat16", "--steps", "3", *sizes, "--device", "cpu"]
    cli.main(["peers", *words, "--out-dir", str(tmp_path)])
    (job,) = json.loads((tmp_path / "peers.json").read_text())["jobs"]
    names = ["minigrpo, lora-bfloat16", "TRL, lora-bfloat16", "TRL, as it is"]
    assert [row["name"] for row in job["rows"]] == names
    for row in job["rows"]:
        assert row["status"] == "ok" and row["s_per_step"] > 0 and row["peak_mib"] > 0
        assert row["completion_tokens"] == 2 * 2 * 6  # forced: nobody ends early
    assert len({row["held_out_before"] for row in job["rows"]}) == 1
    ours, theirs, _ = job["rows"]
    assert theirs["tokens_run"] == 4 * (6 + 6) > ours["tokens_run"]
    assert "TRL, as it is" in (tmp_path / "peers.md").read_text()
    assert "TRL's best settings here, lora-bfloat16" in capsys.readouterr().out


def make_small(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Shrink the job of 494M parameters."""
    small = {**JOBS[QWEN].workload, **SMALL_QWEN}
    monkeypatch.setitem(peers.JOBS, QWEN, replace(JOBS[QWEN], workload=small, **changes))
