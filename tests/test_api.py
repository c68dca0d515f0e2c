"""`minigrpo.train`: objects in place of names and files, and the run that it returns."""

import contextlib
import copy
import math
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import minigrpo
from minigrpo.build import Job, check_examples, make_tokenizer, resolve
from minigrpo.config import Config
from minigrpo.errors import RunFailed
from minigrpo.given import Given
from minigrpo.losses import LOSSES, Clip, LossInputs, LossSpec, per_token
from minigrpo.metrics import headline
from minigrpo.model import lora
from minigrpo.model.source import ModelSource
from minigrpo.model.transformer import ModelShape
from minigrpo.run.console import Console
from minigrpo.run.logging import read_jsonl, read_run
from minigrpo.tasks.base import WrappedTask
from minigrpo.tasks.chess_env import ChessEnv
from minigrpo.text.encoding import encode_prompt
from minigrpo.tools.cli import main
from minigrpo.tools.doctor import HEADLINES, diagnose
from minigrpo.tools.models import ModelArguments, config_of
from minigrpo.types import EXACT, REWARD, Example

from . import tiny
from .steps import attending
from .test_tools import call
from .tiny import ask, read_json, refused

ROWS = [{"prompt": ask(f"{i}+1?"), "solution": i + 1} for i in range(40)]
SIZES = {**tiny.TINY, "reward_weights": {}, "quiet": True}


def digits(example: Example, text: str) -> float:
    return sum(c.isdigit() for c in text) / (1 + len(text))


@minigrpo.reward(weight=0.5)
def solved(example: Example, text: str) -> float:
    return float(str(example.fields["solution"]) in text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.tiny_chat_model(tmp_path_factory.mktemp("chat") / "model"))


@pytest.fixture(scope="module")
def run(model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of four steps with rows and rewards from Python."""
    folder = tmp_path_factory.mktemp("api") / "run"
    given = {"model": model, "data": iter(ROWS), "rewards": [digits, solved]}  # any iterable
    return minigrpo.train(**given, out_dir=folder, **SIZES)


def test_a_run_returns_what_it_logged(run: Any) -> None:
    assert run.summary["status"] == "finished"
    assert run.metrics["step"] == [1, 2, 3, 4]
    assert run.evaluations["step"] == [0, 2, 4]
    first = np.array(run.metrics["rewards/digits/mean"])
    second = np.array(run.metrics["rewards/solved/mean"])
    assert np.allclose(run.metrics["reward"], first + 0.5 * second)  # nothing else is paid
    assert len(run.sample("3+1?", 2)) == 2
    assert run.sample("3+1?") == run.sample(ask("3+1?"))
    assert run.sample("3+1?") == run.sample(ask([{"type": "text", "text": "3+1?"}]))


def test_a_reward_that_dies_ends_the_run_which_can_go_on(model: str, tmp_path: Path) -> None:
    """After the first step it fails three times on all completions; a step later it would not."""
    steps = []
    dead = True

    def judge(example: Example, text: str) -> float:
        if steps and dead:
            raise ConnectionError("gone")
        return float(len(text))

    def train(**settings: Any) -> Any:
        given = {"model": model, "data": ROWS, "rewards": [digits, judge], "out_dir": tmp_path}
        options = {**SIZES, "max_steps": 5, "eval_every": 0, **settings}
        return minigrpo.train(**given, callbacks=[lambda step, _: steps.append(step)], **options)

    with pytest.raises(RunFailed, match="judge.*gone"):
        train()
    summary = read_json(tmp_path / "summary.json")
    assert summary["status"] == "failed"
    assert summary["step"] == 4
    assert steps == [1, 2, 3]
    dead = False
    assert train(resume="auto").summary["step"] == 5


def broken(example: Example, text: str) -> float:
    return float(example.fields["no such column"])


def test_rewards_that_never_work_or_are_negative_are_refused(model: str, tmp_path: Path) -> None:
    """Nobody knows what a broken one would have paid: 0 might be the best of the curve."""
    given = {"model": model, "data": ROWS, **SIZES}
    with pytest.raises(RunFailed, match="broken.*no such column"):
        minigrpo.train(**given, rewards=[digits, broken], out_dir=tmp_path / "a")
    (evaluation,) = read_jsonl(tmp_path / "a" / "eval.jsonl")
    (metrics,) = read_jsonl(tmp_path / "a" / "metrics.jsonl")
    assert evaluation["reward"] is None and "reward" not in metrics
    double = minigrpo.reward(lambda example, text: 2.0, name="double", success=True)
    with pytest.raises(RunFailed, match="double"):
        minigrpo.train(**given, rewards=double, out_dir=tmp_path / "double")
    below = minigrpo.reward(lambda example, text: -1.0, name="below")
    refused(minigrpo.train, **given, rewards=below, loss="maxrl", out_dir=tmp_path / "b")
    assert not read_jsonl(tmp_path / "b" / "metrics.jsonl")


def test_without_answers_the_reward_is_the_headline(run: Any) -> None:
    assert WrappedTask(Mock(success=EXACT, held_out=Example, reward_weights={})).success == REWARD
    found = read_run(run.folder)
    assert found.success == headline(found.evaluations[-1]) == REWARD
    assert math.isinf(found.headlines[-1].low)
    last = float(found.overview()[3])
    assert last == pytest.approx(run.evaluations["reward_sampled"][-1], abs=1e-3)
    assert HEADLINES not in [rule.series for rule, _ in diagnose(found)]


def test_a_resume_needs_the_objects_and_is_bit_equal(run: Any, model: str, tmp_path: Path) -> None:
    def go(data: Any = ROWS, rewards: Any = (digits, solved), **settings: Any) -> Any:
        given = {"model": model, "data": data, "rewards": rewards, "out_dir": tmp_path}
        return minigrpo.train(**given, **SIZES, **settings)

    assert go(stop_after=2).summary["status"] == "stopped"
    heavier = minigrpo.reward(weight=5)(solved.function)
    for changed in ({"data": ROWS[1:]}, {"rewards": [digits, heavier]}):
        refused(go, resume="auto", **changed)
    flags = ["--config", tmp_path / "config.toml", "--out-dir", tmp_path, "--resume", "auto"]
    assert call("train", *flags) == 2
    assert call("evaluate", tmp_path) == 2
    assert go(resume="auto").summary["step"] == 4
    again, whole = (folder / "model.safetensors" for folder in (tmp_path, run.folder))
    assert again.read_bytes() == whole.read_bytes()
    main(["sample", str(tmp_path), "--prompt", "3+1?", "--n", "1"])  # needs no objects


def test_tasks_and_models_may_be_objects_and_callbacks_see_each_step(tmp_path: Path) -> None:
    model = minigrpo.Transformer.from_pretrained(tiny.tiny_chess_model(tmp_path / "model"))
    lora.add_adapters(model, rank=2)  # without --lora-rank, all weights are trained
    seen = []
    given = {**SIZES, "model": model, "reward_weights": {"similarity": 1.0}}
    for name, task in {"class": ChessEnv, "object": ChessEnv(0)}.items():
        seen.clear()
        run = minigrpo.train(
            task=task,
            out_dir=tmp_path / name,
            callbacks=[lambda step, metrics: seen.append(step)],
            **given,
        )
        assert seen == [1, 2, 3, 4]
    refused(minigrpo.train, task=task, callbacks=[object()], **given)
    assert run.model is model
    assert not lora.adapters(model)
    assert "python:ChessEnv" in (run.folder / "config.toml").read_text()
    # the model is no longer that of the start
    refused(minigrpo.train, task=task, out_dir=run.folder, resume="auto", **given)


PAID = {"digits": 1.0, "solved": 0.5}
UNJUDGED = {"judge": "none"}


@pytest.mark.parametrize(
    ("settings", "objects", "expected"),
    [
        ({}, {}, {"name": "chess-env"}),
        ({}, {"rewards": [digits, solved]}, {"name": "chess-env", "reward_weights": PAID}),
        ({"data": "rows.jsonl"}, {}, {"name": "prompts"}),
        ({"data": "rows.jsonl"}, {"rewards": digits}, {"name": "prompts", "task_args": UNJUDGED}),
        ({}, {"data": ROWS, "rewards": digits}, {"name": "prompts", "task_args": UNJUDGED}),
    ],
)
def test_task_auto(settings: Any, objects: Any, expected: dict[str, Any]) -> None:
    given = Given.of(**objects)
    config = resolve(Config.of(model="scratch", **settings), given)
    full = {"task_args": {}, "reward_weights": {}, **expected}
    assert {name: getattr(config.task, name) for name in full} == full
    assert resolve(config) == resolve(config, given) == config  # as a resumed run has it


def test_rewards_and_losses_of_another_form_are_refused() -> None:
    refused(Given.of(loss=LOSSES["nll"]).loss_spec, Config())  # its name alone learns answers
    refused(minigrpo.reward, lambda prompts, completions, **columns: [0.0])
    refused(minigrpo.reward(tokens=True), digits)


def checked(model: str, data: list[Any], eval_data: Any = None, **settings: Any) -> None:
    """Check these rows as a run does before it starts."""
    config = Config.of(model=model, max_new_tokens=8, **settings)
    given = Given.of(data=data, eval_data=eval_data, rewards=digits)
    context = ModelSource.of(model).shape.context
    check_examples(Job.of(resolve(config, given), given), context, Console())


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"prompt": ask("a"), "tools": [{"x": 1}]}, {}),
        ({"prompt": ask("a"), "chat_template_kwargs": "x"}, {}),
        ({"prompt": "a"}, {"teacher": "self", "teacher_context": "hint"}),
        ({"prompt": "a", "environment": "none"}, {"environment": "shop.py:Shop"}),
        ({"prompt": "a", "answer": "b<|im_end|>"}, {"loss": "nll"}),
        ({"prompt": ask("a", "<think>"), "answer": "b"}, {"loss": "nll"}),
    ],
)
def test_what_is_refused_late_names_its_row(
    model: str, row: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text("class Shop:\n    def reset(self): ...\n")
    template = tiny.QWEN_TEMPLATE.replace("tool | tojson", "tool.function.name")
    (tmp_path / "own.jinja").write_text(template)
    rows = [{"prompt": f"{i}?", "hint": "b", "answer": "c"} for i in range(6)]
    rows.insert(4, row)
    with contextlib.chdir(tmp_path):
        assert "row 5" in refused(checked, model, rows, chat_template="own.jinja", **settings)


@pytest.mark.parametrize(
    ("split", "content"),
    [("data", "\U0001f642\u6f22" * 40), ("eval_data", "what is <|im_end|>?")],
    ids=["many tokens", "a control token"],
)
def test_every_row_is_checked_before_a_run(model: str, split: str, content: str) -> None:
    """And not only those that the first steps ask. Their texts are not the longest."""
    rows = [{"prompt": ask(f"the user asks {i}")} for i in range(300)]
    data = {"data": rows[:200], "eval_data": rows[200:]}
    data[split].insert(90, {"prompt": ask(content)})
    assert f"{split}, row 91:" in refused(checked, model, **data)


def test_what_rows_say_in_vain_is_said(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def said(rows: list[dict[str, Any]], **settings: Any) -> list[int]:
        checked(model, rows, **settings)
        return [stream.count("\n") for stream in capsys.readouterr()]

    rendered = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    plain = [{"prompt": f"{i}?"} for i in range(20)]
    assert said(plain) == [1, 0]
    assert said(plain, system="s") == said(ROWS) == [0, 0]
    assert said([{"prompt": rendered.format(i)} for i in range(20)]) == [1, 1]
    assert said([{**row, **thinking} for row in ROWS]) == [0, 1]
    assert said(ROWS, chat_args="enable_thinking=false") == [0, 1]


def test_variables_of_the_template_count_wherever_a_run_is_used(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(tiny.QWEN_TEMPLATE + "{{ mood }}")
    out = tmp_path / "run"
    given = {
        **SIZES,
        "model": model,
        "data": ROWS,
        "rewards": digits,
        "chat_template": str(template),
        "max_steps": 1,
        "out_dir": out,
    }
    run = minigrpo.train(**given, chat_args={"mood": "glad"})
    of_tools = make_tokenizer(config_of(ModelArguments(run=str(out)), {}))
    for tokenizer in (run.trainer.job.tokenizer, of_tools):
        ids = encode_prompt(tokenizer, run.trainer.job.task.held_out(0))
        assert tokenizer.text_of(ids).endswith("assistant\nglad")
        assert tokenizer.turn_end == tokenizer.special["<|im_end|>"]
    assert call("export", out, "--out", tmp_path / "exported") == 0
    assert "glad" in capsys.readouterr().out
    refused(minigrpo.train, **given, resume="auto", chat_args={"mood": "sad"})


def test_ctrl_c_ends_the_script_when_the_run_is_saved(model: str, tmp_path: Path) -> None:
    job = {"model": model, "data": ROWS, "rewards": digits, "out_dir": tmp_path, **SIZES}
    with pytest.raises(KeyboardInterrupt):
        minigrpo.train(**job, callbacks=[lambda *_: os.kill(os.getpid(), signal.SIGINT)])
    assert (tmp_path / "checkpoints" / "step_000001").is_dir()
    assert minigrpo.train(**job, resume="auto").summary["step"] == 4


def test_a_low_precision_model_is_trained_in_float32(tmp_path: Path) -> None:
    model = minigrpo.Transformer(ModelShape(360, layers=attending(1))).bfloat16()
    settings = {**tiny.TINY, "learning_rate": 1e-6, "max_steps": 1, "eval_every": 0, "quiet": True}
    minigrpo.train(model=model, out_dir=tmp_path / "run", **settings)
    weight = model.h[0].mlp.up_proj.weight
    assert weight.dtype == torch.float32
    assert (weight != weight.bfloat16().float()).float().mean() > 0.9


def test_a_model_with_adapters_gets_those_that_are_asked_for() -> None:
    model = minigrpo.Transformer(ModelShape(360))
    lora.add_adapters(model, rank=2)
    config = resolve(Config.of(lora_rank=3))
    ModelSource("given").start(config, make_tokenizer(config), print, {}, model)
    assert {len(layer.lora_A) for layer in lora.adapters(model).values()} == {3}


def plain(inputs: LossInputs) -> torch.Tensor:
    return -inputs.ratio * inputs.advantages


SPECS = [
    LossSpec(),
    LossSpec(scale="none"),
    LossSpec(clip=Clip(high=0.3)),
    LossSpec(weights=per_token),
    LossSpec(surrogate=plain),
    LossSpec(surrogate=partial(plain, 1)),
    LossSpec(surrogate=partial(plain, 2)),
    LossSpec(surrogate=plain, needs_entropy=True),
]


def test_losses_of_the_callers_are_told_apart_by_a_resume() -> None:
    texts = [Given.of(loss=spec).as_settings()["loss"] for spec in SPECS]
    assert len(set(texts)) == len(SPECS)
    assert texts == [Given.of(loss=copy.copy(spec)).as_settings()["loss"] for spec in SPECS]
