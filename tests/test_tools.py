"""The commands: exit codes, evaluate, sample and export on a tiny finished run."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from minigrpo import Config, Transformer
from minigrpo.config import places, read_toml
from minigrpo.evaluate import grade
from minigrpo.guard import Diverged
from minigrpo.model.source import RECORD, ModelSource
from minigrpo.run.console import Console
from minigrpo.run.logging import read_jsonl
from minigrpo.text.tokenizer import load_tokenizer
from minigrpo.tools import cli
from minigrpo.tools.models import ModelArguments, config_of, open_with_task
from minigrpo.types import ConfigError

from . import tiny
from .steps import tiny_trainer
from .tiny import read_json

IDS = torch.arange(30)[None]


def call(*argv: object) -> int:
    """Run a command; its exit code."""
    try:
        cli.main([str(word) for word in argv])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    return 0


def loaded(run: Path) -> Transformer:
    return ModelSource.of(str(run)).load("float32", 0, print)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from minigrpo.tools.cli import main; main(['--help']); "
    code += "main(['train', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_the_help_of_a_run_fits_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("train", "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert call("train", "--help", "all") == 0
    every = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in every for name in places())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("two\nlines \x1b[2J"), 2),
        (FileNotFoundError(2, "No such file", "a\nb"), 2),
        (Diverged("the loss is not finite"), 1),
        (KeyboardInterrupt(), 130),
        (KeyError("a bug"), None),
        (ValueError("of a user's function"), None),
    ],
)
def test_an_error_is_one_printable_line_and_an_exit_code_and_a_bug_keeps_its_traceback(
    error: BaseException, code: int | None, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    failing = Mock(side_effect=error)
    monkeypatch.setattr(cli, "_function", lambda name: failing)
    if code is None:
        with pytest.raises(type(error)):
            call("report")
        return
    assert call("report") == code
    printed = capfd.readouterr().err
    assert len(printed.splitlines()) == (code in (1, 2))
    assert printed.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["plan", "--model", "nowhere/at all"],
        ["evaluate", "shipped", "--n", "0"],
        ["evaluate", "nowhere"],
        ["train", "--task", "gym"],
        ["train", "--task-args", "seed"],
        ["train", "--model", "shipped", "--task", "math", "--data", "openai/gsm8k"],
        ["evaluate", "shipped", "--task", "nonsense"],
        ["sample", "shipped", "--prompt", "A", "--max-new-tokens", "100000"],
        ["doctor"],
        ["export", "shipped"],
    ],
)
def test_misuse_exits_with_code_2(argv: list[str]) -> None:
    assert call(*argv) == 2


def settings_of(*argv: object) -> Config:
    return config_of(*ModelArguments.parse([str(word) for word in argv], "prog"))


def test_settings_are_those_of_the_run_or_of_the_task_unless_given(finished_run: Path) -> None:
    saved = Config.from_toml(finished_run / "config.toml")
    own = saved.replace(model=str(finished_run), device="auto")
    assert settings_of(finished_run) == own
    other = settings_of(finished_run, "--max-new-tokens", 9, "--seed", 5)
    assert other == own.replace(max_new_tokens=9, seed=5)
    assert settings_of(finished_run, "--teacher", "runs/gone").loss.teacher == "runs/gone"
    found = settings_of("scratch", "--data", "x", "--task", "math")
    assert found == Config.of(task="math", model="scratch", eval_data="x", tokenizer="chess")


def questions(path: Path, number: int) -> Path:
    rows = ({"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(number))
    return tiny.write_jsonl(path, rows)


def test_evaluate_has_the_numbers_of_training(finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert call("evaluate", finished_run, "--n", 8, "--json", out) == 0
    measures = read_json(out)["measures"]
    last = json.loads((finished_run / "eval.jsonl").read_text().splitlines()[-1])
    assert measures.keys() == last.keys() - {"step"}
    for name, found in measures.items():
        assert found["value"] == pytest.approx(last[name], abs=1e-6)
    answers = read_jsonl(finished_run / "held_out.jsonl")
    for decoding, ending in (("greedy", ""), ("sampled", "_sampled")):
        for name in answers[0][decoding]:
            values = [answer[decoding][name] for answer in answers]
            assert last[name + ending] == pytest.approx(np.mean(values), abs=1e-6)
    # without --n it takes the whole file of data
    file = questions(tmp_path / "test.jsonl", 30)
    own = ("--task", "prompts", "--reward-weights", "exact=1", "--json", out)
    assert call("evaluate", finished_run, "--data", file, *own) == 0
    assert read_json(out)["measures"]["n"]["value"] == 30


def test_the_initial_model_of_a_run_is_the_one_that_it_began_with(finished_run: Path) -> None:
    began_with = read_toml(finished_run / RECORD)["model"]
    config = config_of(ModelArguments(run=str(finished_run)), {})
    _, scorer = open_with_task(config, Console(quiet=True))
    assert scorer.token_model
    initial = scorer.token_model("initial").model.wte.weight
    assert torch.equal(initial, loaded(Path(began_with)).wte.weight)
    assert not torch.equal(initial, loaded(finished_run).wte.weight)


def test_a_prompt_is_a_message_or_raw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.tiny_chat_model(tmp_path / "chat")

    def answer(*words: object) -> str:
        assert call("sample", model, "--prompt", "add 12", "--max-new-tokens", 20, *words) == 0
        return capsys.readouterr().out

    greedy = answer("--n", 0)
    assert answer("--n", 0, "--raw") != greedy  # without the template
    assert answer("--temperature", 9) != greedy
    assert answer("--top-k", 1) == greedy


def test_without_a_prompt_a_question_is_shown_with_what_its_answers_earn(
    finished_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("sample", finished_run, "--n", 2) == 0
    printed = capsys.readouterr().out
    sampler, scorer = open_with_task(settings_of(finished_run), Console(quiet=True))
    example = scorer.task.held_out(0)
    graded = grade(sampler, scorer, [example], 2)
    earned = [f"{total:.4g}" for total in graded.rewards.total[0]]
    assert all(text in printed for text in [example.prompt, *graded.texts[0], *earned])
    assert call("sample", finished_run, "--n", 2, "--temperature", 0.001) == 0
    (greedy,) = grade(sampler, scorer, [example]).texts[0]
    assert capsys.readouterr().out.count(greedy) == 2


def test_an_export_of_a_run_is_a_model_like_any_other(tiny_run: Path, tmp_path: Path) -> None:
    """A run without model file is read from its checkpoint."""
    own = loaded(tiny_run)
    out = tmp_path / "new" / "model"
    (tiny_run / "model.safetensors").unlink()
    assert call("export", tiny_run, "--out", out) == 0
    assert torch.equal(Transformer.from_pretrained(out).logits(IDS), own.logits(IDS))
    generation = read_json(out / "generation_config.json")
    assert generation["eos_token_id"] == [load_tokenizer("chess").eot]
    shutil.rmtree(tiny_run / "checkpoints")
    assert call("export", tiny_run, "--out", tmp_path / "again") == 2


def test_an_export_has_its_tokenizer_template_and_tokens_that_end_a_text(tmp_path: Path) -> None:
    """And the files of converters."""
    model = tiny.tiny_chat_model(tmp_path / "chat")
    out = tmp_path / "out"
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}own: {{ m.content }}<|im_end|>{% endfor %}")
    published = {"temperature": 0.7, "eos_token_id": [0]}
    (model / "generation_config.json").write_text(json.dumps(published))
    (model / "tokenizer.model").write_bytes(b"\x00pieces")
    (model / "added_tokens.json").write_text('{"<think>": 399}')
    assert call("export", model, "--chat-template", own, "--out", out) == 0
    given = load_tokenizer(str(model), str(own))
    back = load_tokenizer(str(out))
    assert back.fingerprint == given.fingerprint
    assert back.stops == given.stops
    generation = read_json(out / "generation_config.json")
    assert generation["temperature"] == 0.7
    assert generation["eos_token_id"][0] == given.eot
    assert {*generation["eos_token_id"]} == given.stops
    before = read_json(model / "tokenizer_config.json")
    assert read_json(out / "tokenizer_config.json") == {**before, "chat_template": own.read_text()}
    assert (out / "chat_template.jinja").read_text() == own.read_text()
    for name in ("tokenizer.model", "added_tokens.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (model / name).read_bytes()


@pytest.mark.parametrize("name", ["tiny-run", "mine"])
def test_an_export_overwrites_nothing(tiny_run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").write_text("mine")
    before = contents(tmp_path)
    assert call("export", tiny_run, "--out", tmp_path / name) == 2
    assert contents(tmp_path) == before


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    model = str(tiny.tiny_chat_model(folder / "chat"))
    rows = {"task": "prompts", "data": str(questions(folder / "data.jsonl", 40))}
    short = {"loss": "nll", "max_steps": 2, "eval_every": 0}
    adapters = {"lora_rank": 2, "lora_alpha": 3.0, "lora_targets": "q_proj,up_proj"}
    tiny_trainer(folder / "run", model=model, **rows, **short, **adapters).fit()
    return folder


def test_an_export_has_merged_adapters(adapted: Path, tmp_path: Path) -> None:
    """Adapters are those of the checkpoint, or of the files that a run leaves."""
    run = adapted / "run"
    out = tmp_path / "out"
    without = tmp_path / "run"
    assert call("export", run, "--out", out) == 0
    shutil.copytree(run, without, ignore=lambda folder, names: {"checkpoints"})
    merged = Transformer.from_pretrained(out).logits(IDS)
    assert torch.equal(merged, loaded(run).logits(IDS))
    assert torch.equal(merged, loaded(without).logits(IDS))
    base = Transformer.from_pretrained(adapted / "chat")
    assert not torch.equal(merged, base.logits(IDS))


@pytest.mark.parametrize("is_saved", [True, False])
def test_adapters_beside_other_weights_are_refused(
    adapted: Path, tmp_path: Path, is_saved: bool
) -> None:
    """Such as a run that went on training. A copy of the base is as good."""
    shutil.copytree(adapted, tmp_path, dirs_exist_ok=True)
    run, base = tmp_path / "run", tmp_path / "chat"
    record = (run / "config.toml").read_text()
    (run / "config.toml").write_text(record.replace(str(adapted), str(tmp_path)))
    if not is_saved:
        shutil.rmtree(run / "checkpoints")
    commands = [("evaluate", run, "--n", 2), ("sample", run, "--prompt", "1+1=")]
    commands.append(("export", run, "--out", tmp_path / "out"))
    for command in commands:
        assert call(*command) == 0
    shutil.rmtree(tmp_path / "out")
    model = Transformer.from_pretrained(base)
    model.load_state_dict({name: 1.01 * x for name, x in model.state_dict().items()})
    model.save_pretrained(base / "model.safetensors")
    for command in commands:
        assert call(*command) == 2
    assert not (tmp_path / "out").exists()
