"""Teachers: what they read, what they teach, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from minigrpo import Trainer
from minigrpo.text.encoding import encode_prompt, pad
from minigrpo.types import Example

from .steps import make_trainer
from .test_packing import naive
from .tiny import SUMS, ask, refused, tiny_chat_model, tiny_chess_model, write_jsonl

ALONE = {"group_size": 1, "reward_weights": {"similarity": 0.0}}


def make_run(folder: Path, name: str = "run", **changes: Any) -> Trainer:
    """A run in float64 on sums."""
    given = {"task": "prompts", "data": SUMS, "model": str(tiny_chess_model(folder / "model"))}
    return make_trainer(folder / name, **{**given, "seed": 3, **changes})


@pytest.mark.parametrize("teacher", ["self", "initial"])
def test_the_model_itself_teaches_nothing_without_context(tmp_path: Path, teacher: str) -> None:
    run = make_run(tmp_path, teacher=teacher, **ALONE, num_iterations=2, warmup_steps=0)
    run.teacher.model.load_state_dict(run.model.state_dict())  # `make_trainer` changed it
    batch, _ = run.learner.prepare(run.batches.batch(0))
    assert batch.teacher_logp is not None
    assert_close(batch.teacher_logp, batch.old_logp, rtol=0, atol=1e-12)
    metrics = run.one_step()
    assert metrics["grad_norm"] < 1e-10
    assert metrics["teacher_kl"] == pytest.approx(0, abs=1e-12)
    with torch.no_grad():
        run.model.wte.weight.mul_(1.5)
    batch, _ = run.learner.prepare(run.batches.batch(1))
    assert torch.allclose(batch.teacher_logp, batch.old_logp) == (teacher == "self")


@pytest.mark.parametrize("chat", [False, True])
def test_a_teacher_with_context_reads_it_with_the_prompt(tmp_path: Path, chat: bool) -> None:
    """After the last message; before a plain prompt, which the completion continues."""
    questions = [f"{n} + 1 is" for n in range(40)]
    prompts = [ask(question) for question in questions] if chat else questions
    rows = [{"prompt": prompt, "answer": "1", "hint": "one more"} for prompt in prompts]
    options = {"data": str(write_jsonl(tmp_path / "rows.jsonl", rows)), "teacher_context": "hint"}
    if chat:
        options["model"] = str(tiny_chat_model(tmp_path / "chat"))
    run = make_run(tmp_path, teacher="self", temperature=0.8, **options)
    batch = run.batches.batch(0)
    prepared, _ = run.learner.prepare(batch)
    prompts = []
    for example in batch.examples:
        if chat:
            asked = {"role": "user", "content": f"{example.prompt}\n\none more"}
            told = Example("", messages=(asked,))
        else:
            told = Example(f"one more\n\n{example.prompt}")
        prompts.append(encode_prompt(run.job.tokenizer, told))
    prompt_ids, prompt_len = pad(prompts)
    seen = replace(batch.completions, prompt_ids=prompt_ids, prompt_len=prompt_len)
    expected, _ = naive(run.model, seen, 0.8)
    assert_close(prepared.teacher_logp, expected.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "changes",
    [
        {"teacher": "chat"},  # another tokenizer
        {"teacher": "self", "teacher_context": "hint"},  # no row has one
        {"teacher": "self", "loss": "nll"},
    ],
)
def test_what_cannot_teach_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    if changes.get("teacher") == "chat":
        changes = {"teacher": str(tiny_chat_model(tmp_path / "chat"))}
    refused(make_run, tmp_path, **changes)


def test_what_a_teacher_reads_must_fit_its_context(tmp_path: Path) -> None:
    def make(hint: str) -> None:
        rows = [{"prompt": f"{i}+1=", "answer": str(i + 1), "hint": hint} for i in range(30)]
        data = str(write_jsonl(tmp_path / "rows.jsonl", rows))
        make_run(tmp_path, data=data, teacher="self", teacher_context="hint")

    refused(make, "long " * 99)
    make("short")
