"""Runs with --confidence: the warm start, GRPO, the tools, and the preset of RLCR."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minigrpo import Config, Trainer
from minigrpo.runtime import announce
from minigrpo.runtime.combinations import check_shares
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.logging import Screen
from minigrpo.runtime.no_effect import Situation
from minigrpo.tasks.confidence import REQUEST, WithConfidence, parse
from minigrpo.tools import evaluate, reliability

from .chat_model import write_lines, write_model
from .conftest import SHAPES
from .gradients import TINY
from .test_chat import ask

ROOT = Path(__file__).parent.parent
QUESTIONS = [{"problem": f"What is {i}?", "answer": str(i)} for i in range(40)]


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    small = {**TINY, "reward_weights": "", "confidence": True, "max_steps": 1, "eval_every": 0}
    small |= {"task": "hidden-digit", "max_new_tokens": 32, "out_dir": str(folder)}
    return {**small, **changes}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_from_the_shipped_model_and_its_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"prompts_per_step": 8, "eval_size": 32, "learning_rate": 1e-5}
    trained = options(tmp_path / "run", init_from="shipped", **small)
    Trainer(Config.of(**trained), quiet=True).fit()
    first, _ = lines(tmp_path / "run" / "eval.jsonl")
    assert list(first)[:3] == ["step", "n", "correct_sampled"]
    assert first["format_sampled"] > 0.8 and first["possible"] > 0.8
    assert first["best_accuracy"] == pytest.approx(0.45) and first["best_brier"] == 0.125
    assert first["ece_sampled"] > 0.1  # its confidences are random
    (metrics,) = lines(tmp_path / "run" / "metrics.jsonl")
    parts = (metrics[f"rewards/{name}/mean"] for name in ("format", "correct", "brier"))
    assert metrics["reward"] == pytest.approx(sum(parts) / 2, rel=1e-5)
    assert metrics["rewards/format/mean"] > 0.8 and "rewards/confidence/mean" in metrics

    capsys.readouterr()
    plot = tmp_path / "plot.svg"
    evaluate.main([str(tmp_path / "run"), "--n", "32", "--plot", str(plot)])
    assert f"wrote {plot}" in capsys.readouterr().out.replace("\n", "")
    assert plot.stat().st_size > 1000
    with pytest.raises(SystemExit):
        evaluate.main(["shipped", "--n", "1", "--plot", str(plot)])
    assert "--plot draws stated confidences, so it needs --confidence" in capsys.readouterr().err


def test_a_warm_start_states_random_confidences(tmp_path: Path) -> None:
    warm = options(tmp_path / "warm", loss="nll", kl_coef=0.0, context=64, prompts_per_step=40)
    trainer = Trainer(Config.of(**warm), quiet=True)
    stated = [parse(text, chat=False) for (text,) in trainer.source.batch(0).texts]
    assert len({one.confidence for one in stated if one}) > 5 and None not in stated


def test_the_diagram_counts_answers_and_needs_some(tmp_path: Path) -> None:
    parts = {
        "format": np.array([1, 1, 1, 0]),
        "confidence": np.array([1, 0.3, 0.3, 0]),
        "correct": np.array([1.0, 0, 1, 0]),
    }
    reliability.draw({"greedy": parts}, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "greedy: ECE 0.133, Brier score 0.193" in text
    nothing = {name: x[3:] for name, x in parts.items()}
    reliability.draw({"greedy": parts, "sampled": nothing}, tmp_path / "b.svg")
    assert "sampled: ECE" not in (tmp_path / "b.svg").read_text()
    with pytest.raises(ConfigError, match="no completion states a confidence"):
        reliability.draw({"greedy": nothing}, tmp_path / "c.svg")


def test_a_users_own_task_is_checked_and_asked_with_confidence(tmp_path: Path) -> None:
    reverse = str(ROOT / "examples" / "reverse.py")
    trainer = Trainer(Config.of(**options(tmp_path / "run", task=reverse)), quiet=True)
    example = trainer.task.train(3)
    assert example.index == 3 and example.prompt[0] not in "<"
    table = trainer.scorer.score([example], [[example.answer, example.answer[:-1]]])
    assert table.total[0].tolist() == [1.5, 0] and table.parts["similarity"][0, 0] == 1

    bad = tmp_path / "bad.py"
    bad.write_text(Path(reverse).read_text().replace("float(text == example.answer)", "2.0"))
    with pytest.raises(ConfigError, match="exact is the success of the task, so it must be"):
        Trainer(Config.of(**options(tmp_path / "other", task=str(bad))), quiet=True)


# --- the preset -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "qwen", context=1024)


def preset(**changes: Any) -> Config:
    return Config.from_toml(ROOT / "configs" / "rlcr.toml").replace(device="cpu", **changes)


def test_rlcrs_preset_asks_for_the_published_form_and_pays_by_its_formula(
    model: Path, tmp_path: Path
) -> None:
    """tests/test_config.py makes a step with it."""
    data = write_lines(tmp_path / "qa.jsonl", QUESTIONS)
    small = {"max_new_tokens": 6, "out_dir": str(tmp_path / "run")}
    trainer = Trainer(preset(**small, init_from=str(model), data=str(data)), quiet=True)
    weights = {"format": 0.5, "correct": 0.5, "brier": 0.5, "confidence": 0}
    assert trainer.scorer.weights == weights
    assert isinstance(trainer.task, WithConfidence)
    example = trainer.task.train(0)
    (message,) = example.messages
    assert message["content"].startswith(example.prompt)
    assert message["content"].endswith(REQUEST)
    stated = parse(example.answer, chat=True)
    assert stated is not None and stated.answer == example.prompt[8:-1]
    texts = [example.answer, example.answer.replace("1.0", "0.4"), "It is so."]
    assert trainer.scorer.score([example], [texts]).total[0] == pytest.approx([1.5, 1.32, 0])


@pytest.mark.parametrize(("processes", "share"), [(4, 18), (6, 12)])
def test_rlcrs_batch_does_not_depend_on_the_number_of_processes(
    processes: int, share: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = preset()
    check_shares(config, processes)
    task: Any = type("Task", (), {"has_messages": True})
    situation = Situation(config, torch.device("cpu"), processes, SHAPES["gpt2"], task)
    announce.introduce(Screen(quiet=False, rank=0), situation, 1, {"format": 0.5})
    said = f"bnpo: 72 prompts x 32 completions per step, on {processes} x cpu: {share} prompts per"
    assert said in " ".join(capsys.readouterr().out.split())


def test_messages_keep_their_system_message(model: Path, tmp_path: Path) -> None:
    rows = [{"messages": ask(f"{i}?", system="Be brief."), "answer": str(i)} for i in range(40)]
    data = write_lines(tmp_path / "chat.jsonl", rows)
    changes = {"task": "chess-env", "data": str(data), "init_from": str(model)}
    trainer = Trainer(Config.of(**options(tmp_path / "run", **changes)), quiet=True)
    example = trainer.task.train(0)
    assert [message["role"] for message in example.messages] == ["system", "user"]
    assert example.messages[1]["content"] == example.prompt + REQUEST
