"""Teachers: what they read, what they teach, and what is refused."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from minigrpo import Trainer, Transformer
from minigrpo.model.encoding import encode_prompt, to_completions
from minigrpo.types import ConfigError, Example

from .steps import make_trainer
from .test_packing import naive
from .tiny import refused, tiny_chat_model, tiny_chess_model, write_jsonl

SUMS = str(Path(__file__).parents[1] / "examples" / "sums.jsonl")
ALONE = {"group_size": 1, "reward_weights": {"similarity": 0.0}}


def make_run(folder: Path, name: str = "run", **changes: Any) -> Trainer:
    """A run in float64 on sums."""
    given = {"task": "prompts", "data": SUMS, "model": str(tiny_chess_model(folder / "model"))}
    return make_trainer(folder / name, **{**given, "seed": 3, **changes})


def sharp(folder: Path) -> str:
    """A teacher that is not near the uniform distribution."""
    model = Transformer.from_pretrained(tiny_chess_model(folder / "teacher"), seed=1)
    model.load_state_dict({name: x * 5 for name, x in model.state_dict().items()})
    model.save_pretrained(folder / "teacher" / "model.safetensors")
    return str(folder / "teacher")


@pytest.mark.parametrize("teacher", ["self", "initial"])
def test_the_model_itself_teaches_nothing_without_context(tmp_path: Path, teacher: str) -> None:
    run = make_run(tmp_path, teacher=teacher, **ALONE, num_iterations=2, warmup_steps=0)
    run.teacher.model.load_state_dict(run.model.state_dict())  # `make_trainer` changed it
    batch, _ = run.learner.prepare(run.source.batch(0))
    assert batch.teacher_logp is not None
    assert_close(batch.teacher_logp, batch.old_logp, rtol=0, atol=1e-12)
    assert run.one_step()["grad_norm"] < 1e-10
    with torch.no_grad():
        run.model.wte.weight.mul_(1.5)
    batch, _ = run.learner.prepare(run.source.batch(1))
    assert torch.allclose(batch.teacher_logp, batch.old_logp) == (teacher == "self")


@pytest.mark.parametrize("chat", [False, True])
def test_a_teacher_with_context_reads_it_with_the_prompt(tmp_path: Path, chat: bool) -> None:
    """After the last message; before a plain prompt, which the completion continues."""
    rows = [{"prompt": f"{n} + 1 is", "answer": str(n + 1), "hint": "one more"} for n in range(40)]
    if chat:
        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    options = {"data": str(write_jsonl(tmp_path / "rows.jsonl", rows)), "teacher_context": "hint"}
    if chat:
        options["model"] = str(tiny_chat_model(tmp_path / "chat"))
    run = make_run(tmp_path, teacher="self", temperature=0.8, **options)
    learner, batch = run.learner, run.source.batch(0)
    before, _ = learner.prepare(batch)
    prompts = []
    for example in batch.examples:
        if chat:
            asked = {"role": "user", "content": f"{example.prompt}\n\none more"}
            told = Example("", messages=(asked,))
        else:
            told = Example(f"one more\n\n{example.prompt}")
        prompts.append(encode_prompt(run.tokenizer, told))
    completions = batch.completions
    ids = [
        [row[:n].tolist() for row, n in zip(*group, strict=True)]
        for group in zip(completions.completion_ids, completions.completion_len, strict=True)
    ]
    seen = to_completions(prompts, ids)
    expected = naive(run.model, seen, 0.8)[0].detach()
    assert_close(before.teacher_logp, expected, rtol=0, atol=1e-10)


def test_a_student_nears_its_teacher_without_rewards_and_groups(tmp_path: Path) -> None:
    options = {"teacher": sharp(tmp_path), **ALONE, "prompts_per_step": 16}
    run = make_run(tmp_path, max_steps=30, learning_rate=0.03, **options)
    found = [run.one_step() for _ in range(30)]
    assert all(step["reward_std"] == 0 for step in found)
    assert sum(x["teacher_kl"] for x in found[-5:]) < 0.8 * sum(x["teacher_kl"] for x in found[:5])


@pytest.mark.parametrize(
    "changes",
    [
        {"teacher": "chat"},  # another tokenizer
        {"teacher": "self", "teacher_context": "hint"},  # no row has one
        {"teacher": "self", "loss": "nll"},
        {"group_size": 1},
        {"teacher": "self", "group_size": 1, "overlong": "punish"},
        {"reward_weights": {"similarity": 0.0}},
    ],
)
def test_what_cannot_teach_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    if changes.get("teacher") == "chat":
        changes = {"teacher": str(tiny_chat_model(tmp_path / "chat"))}
    refused(make_run, tmp_path, **changes)


def test_what_a_teacher_reads_must_fit_its_context(tmp_path: Path) -> None:
    for hint in ("short", "long " * 99):
        rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "hint": hint} for i in range(30)]
        data = str(write_jsonl(tmp_path / "rows.jsonl", rows))
        with pytest.raises(ConfigError) if hint != "short" else nullcontext():
            make_run(tmp_path, hint[:5], data=data, teacher="self", teacher_context="hint")
