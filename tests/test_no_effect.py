"""Every flag has an effect in every run, or a row that says when it has none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minigrpo import Config, Trainer
from minigrpo.model.shape import ModelShape
from minigrpo.runtime.flags import flag
from minigrpo.runtime.no_effect import TABLE, Situation, reason, without_effect
from minigrpo.runtime.settings import places
from minigrpo.tasks.chess_env import ChessEnv

from .gradients import TINY

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
SHAPE = ModelShape(360, context=256, layers=1, width=16, heads=2)


class OnlyScore:
    """A task without `score_batch`, whose scores therefore have a time limit."""


Settings = dict[str, Any]
SUPERVISED: Settings = {"loss": "nll"}


# setting -> [(settings with which it has no effect, what is changed so that it has one), ...]
@pytest.fixture(autouse=True)
def _on_a_cpu_for_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minigrpo.runtime.no_effect.onednn_is_faster", lambda: True)


# `device`, `processes` and `own` (a task without score_batch) are of the situation
CASES: dict[str, list[tuple[Settings, Settings]]] = {
    "difficulty": [
        ({"difficulty": "3x20"}, {"task": "countdown-chat"}),
        ({"difficulty": "3x20", "task": "countdown", "data": "a.jsonl"}, {"data": ""}),
    ],
    "history": [
        ({"history": 3, "data": "a.jsonl"}, {"data": ""}),
        ({"history": 3, "data": "a.jsonl,b.txt"}, {"data": "a.jsonl,b.pgn"}),
        ({"history": 3, "task": "own.py"}, {"task": "chess-env"}),
        ({"history": 3, "task": "countdown"}, {"task": "chess-env"}),
    ],
    "student": [({"student": "runs/s"}, {"task": "teach"})],
    "base_dtype": [
        ({"base_dtype": "bfloat16", "student": "s"}, {"lora_rank": 2}),
        ({"base_dtype": "bfloat16", "student": "s"}, {"rewards": "r.py"}),
    ],
    "reward_timeout": [
        ({"reward_timeout": 3.0}, {"rewards": "r.py"}),
        ({"reward_timeout": 3.0}, {"own": True}),
        ({"reward_timeout": 4.0}, {"task": "code"}),
    ],
    "chat_template": [({"chat_template": "t.jinja"}, {"system": "Be kind."})],
    "arch": [({"arch": "llama"}, {"init_from": "scratch"})],
    "layers": [({"layers": 2}, {"init_from": "scratch"})],
    "width": [({"width": 64}, {"init_from": "scratch"})],
    "heads": [({"heads": 2}, {"init_from": "scratch"})],
    "kv_heads": [
        ({"kv_heads": 2, "arch": "llama"}, {"init_from": "scratch"}),
        ({"kv_heads": 2, "init_from": "scratch"}, {"arch": "llama"}),
    ],
    "context": [({"context": 128}, {"init_from": "scratch"})],
    "lora_alpha": [({"lora_alpha": 3.0}, {"lora_rank": 2})],
    "lora_targets": [({"lora_targets": "c_attn"}, {"lora_rank": 2})],
    "group_size": [({**SUPERVISED, "group_size": 8}, {"loss": "grpo"})],
    "top_k": [({**SUPERVISED, "top_k": 5}, {"loss": "grpo"}), ({"top_k": 360}, {"top_k": 359})],
    "top_p": [({**SUPERVISED, "top_p": 0.5}, {"loss": "grpo"})],
    "min_p": [({**SUPERVISED, "min_p": 0.5}, {"loss": "grpo"})],
    "dynamic_sampling": [({**SUPERVISED, "dynamic_sampling": 2}, {"loss": "grpo"})],
    "clip_low": [
        ({"clip_low": 0.1}, {"num_iterations": 2}),
        ({"clip_low": 0.1, "loss": "cispo", "num_iterations": 2}, {"loss": "dapo"}),
    ],
    "clip_high": [
        ({"clip_high": 0.1}, {"num_iterations": 2}),
        ({**SUPERVISED, "clip_high": 0.1, "num_iterations": 2}, {"loss": "gspo"}),
        ({"loss": "sapo", "clip_high": 0.1, "num_iterations": 2}, {"loss": "gmpo"}),
    ],
    "ratio_cap": [
        ({"ratio_cap": 3.0, "loss": "cispo"}, {"num_iterations": 2}),
        ({"ratio_cap": 3.0}, {"ratio_cap": 0.5}),
        ({**SUPERVISED, "ratio_cap": 0.5}, {"loss": "grpo"}),
        ({"loss": "gmpo", "ratio_cap": 3.0, "num_iterations": 2}, {"loss": "maxrl"}),
    ],
    "advantage": [({**SUPERVISED, "advantage": "leave_one_out"}, {"loss": "grpo"})],
    "scale": [({**SUPERVISED, "scale": "none"}, {"loss": "grpo"})],
    "kl": [({"kl": "k1_reward"}, {"kl_coef": 0.1}), ({"kl": "k3"}, {"kl_coef": 0.1})],
    "overlong": [({**SUPERVISED, "overlong": "mask"}, {"loss": "grpo"})],
    "overlong_buffer": [
        ({"overlong_buffer": 8}, {"overlong": "punish"}),
        ({**SUPERVISED, "overlong": "punish", "overlong_buffer": 8}, {"loss": "grpo"}),
    ],
    "sampler_correction": [({**SUPERVISED, "sampler_correction": True}, {"loss": "grpo"})],
    "sampler_correction_cap": [({"sampler_correction_cap": 3.0}, {"sampler_correction": True})],
    "shuffle_rewards": [({**SUPERVISED, "shuffle_rewards": True}, {"loss": "grpo"})],
    "fast": [({"fast": True, "device": CPU}, {"device": CUDA})],
    "amp_dtype": [({"amp_dtype": "bfloat16"}, {"use_amp": True})],
    "use_tf32": [({"use_tf32": True}, {"device": CUDA})],
    "onednn": [({"onednn": False, "device": CUDA}, {"device": CPU})],
    "keep_freed_memory": [({"keep_freed_memory": False, "device": CUDA}, {"device": CPU})],
    "num_speculative_tokens": [
        (
            {"num_speculative_tokens": 3, "speculative_decoding": False},
            {"speculative_decoding": True},
        )
    ],
    "skip_zero_variance_groups": [
        ({"skip_zero_variance_groups": False, "kl_coef": 0.1}, {"kl_coef": 0.0}),
        ({"skip_zero_variance_groups": True, "loss": "bnpo"}, {"loss": "grpo"}),
        ({**SUPERVISED, "skip_zero_variance_groups": True}, {"loss": "grpo"}),
    ],
    "num_reward_workers": [
        ({"num_reward_workers": 4, "parallel_rewards": False}, {"parallel_rewards": True})
    ],
    "overlap_rewards": [
        ({"overlap_rewards": True}, {"rollout_batch_size": 4}),
        ({"overlap_rewards": True}, {"kl_coef": 0.1}),
        ({"overlap_rewards": True, "kl_coef": 0.1, "dynamic_sampling": 1}, {"dynamic_sampling": 0}),
        ({"overlap_rewards": True, "rollout_batch_size": 8, "processes": 2}, {"processes": 1}),
        (
            {"overlap_rewards": True, "rollout_batch_size": 4, "parallel_rewards": False},
            {"rewards": "r.py"},
        ),
    ],
    "micro_batch_size": [({"micro_batch_size": 16}, {"micro_batch_size": 8})],
    "rollout_batch_size": [
        ({"rollout_batch_size": 16}, {"rollout_batch_size": 8}),
        ({**SUPERVISED, "rollout_batch_size": 8}, {"loss": "grpo"}),
    ],
    "chunked_logprobs": [
        (
            {"chunked_logprobs": True, "group_size": 2, "micro_batch_size": 1},
            {"micro_batch_size": 8},
        ),
        ({**SUPERVISED, "chunked_logprobs": True, "micro_batch_size": 4}, {"micro_batch_size": 8}),
    ],
    "offload_reference": [
        ({"offload_reference": True, "device": CUDA}, {"kl_coef": 0.1}),
        ({"offload_reference": True, "kl_coef": 0.1}, {"device": CUDA}),
        (
            {"offload_reference": True, "kl_coef": 0.1, "device": CUDA, "lora_rank": 2},
            {"lora_rank": 0},
        ),
    ],
    "offload_optimizer": [({"offload_optimizer": True}, {"device": CUDA})],
    "share_prompt_kv": [({"share_prompt_kv": True, "kv_cache": False}, {"kv_cache": True})],
    "stop_after": [({"stop_after": 350}, {"stop_after": 349})],
    "eval_size_during": [
        ({"eval_size_during": 9, "eval_every": 0}, {"eval_every": 10}),
        ({"eval_size_during": 9, "eval_every": 350}, {"eval_every": 349}),
        ({"eval_size_during": 9, "stop_after": 99}, {"stop_after": 100}),
    ],
    "pg_timeout": [({"pg_timeout": 60.0}, {"processes": 2})],
}


def situation(settings: Settings) -> Situation:
    """A run with these settings, on a CPU, in one process, unless they say otherwise."""
    settings = dict(settings)
    device, processes = settings.pop("device", CPU), settings.pop("processes", 1)
    task: Any = OnlyScore() if settings.pop("own", False) else ChessEnv(0)
    config = Config.of(**settings, device=device.type)
    return Situation(config, device, processes, SHAPE, task)


# settings without a row, and why none is needed
ALWAYS = {
    "task": "decides the prompts, or which questions of --data are asked",
    "data": "decides the prompts",
    "confidence": "changes the form of a completion, and its reward",
    "system": "begins every prompt; without a chat template it is an error",
    "rewards": "their parts are at least reported",
    "reward_weights": "decide the reward, at least in evaluations",
    "init_from": "decides the model",
    "tokenizer": "must fit the model",
    "lora_rank": "decides which weights are trained",
    "prompts_per_step": "the size of a batch, for every loss",
    "max_new_tokens": "bounds answers in evaluations too",
    "temperature": "divides the logits of every loss, the supervised one included",
    "loss": "decides the objective",
    "kl_coef": "with --loss nll it is an error",
    "num_iterations": "updates per batch, for every loss",
    "learning_rate": "for every loss",
    "warmup_steps": "for every loss",
    "weight_decay": "for every loss",
    "grad_clip": "for every loss",
    "eval_samples": "evaluations sample, whatever the loss",
    "device": "decides where the run computes",
    "use_amp": "also on CPU, where it may be slower",
    "low_precision_weights": "evaluations sample with them; without --use-amp they are an error",
    "compile_model": "every run updates",
    "packing": "also with --loss nll, which attends by other code with each packing",
    "kv_cache": "evaluations sample too",
    "speculative_decoding": "evaluations sample too, and uncached rounds get fewer as well",
    "cuda_graphs": "on CPU it is slower, and a warning says so; without a cache it is an error",
    "fused_optimizer": "CPU and CUDA have a fused AdamW",
    "parallel_rewards": "evaluations are scored too",
    "gradient_checkpointing": "every run updates",
    "max_steps": "the schedule depends on it",
    "eval_every": "a number beyond the end turns evaluations in between off",
    "eval_size": "every run evaluates at both ends",
    "save_every": "a number beyond the end leaves the last checkpoint only",
    "keep_last": "counts the checkpoints of earlier sessions too",
    "seed": "decides examples and samples",
    "out_dir": "decides where files go",
    "resume": "a folder without a checkpoint is announced as such",
    "plan": "ends the run",
    "track": "a tracker gets what is logged",
    "profile": "a run that ends before the traced steps is an error",
}


@pytest.fixture(autouse=True)
def no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this CPU --fast turns on nothing beyond the defaults."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict, raising=False)


def test_every_flag_has_a_row_or_a_reason_why_it_needs_none() -> None:
    """A new flag fails here until somebody has thought about when it does nothing."""
    names = set(places(Config))
    assert names == set(TABLE) | set(ALWAYS)
    assert not set(TABLE) & set(ALWAYS)
    assert set(CASES) == set(TABLE)
    assert all(len(words) > 10 for words in ALWAYS.values())


@pytest.mark.parametrize("name", TABLE)
def test_a_flag_without_effect_is_listed_and_one_with_an_effect_is_not(name: str) -> None:
    for idle, changed in CASES[name]:
        without, having = situation(idle), situation({**idle, **changed})
        shown = flag(name if idle[name] is not False else f"no_{name}")
        assert reason(name, without) and not reason(name, having), (idle, changed)
        words = without_effect(without).replace("(", " ").split()
        assert shown in words
        assert shown not in without_effect(having).replace("(", " ").split()


def test_every_reason_of_a_row_has_a_case() -> None:
    for name, row in TABLE.items():
        said = {reason(name, situation(idle)) for idle, _ in CASES[name]}
        if name == "use_tf32":
            said.add("TF32 needs a card of compute capability 8.0")  # in test_fast.py
        if name == "onednn":
            said.add("this CPU has no AVX-512, or is Intel's")  # in test_onednn.py
        if name == "sampler_correction_cap":
            said.add(reason(name, situation({**SUPERVISED, "sampler_correction": True})))
        if name == "overlap_rewards":
            said.add(reason(name, situation({**SUPERVISED, "overlap_rewards": True})))
        assert said == {words for _, words in row}, name


def test_settings_at_their_default_are_listed_only_if_they_were_typed(tmp_path: Path) -> None:
    assert without_effect(situation({})) == ""
    file = tmp_path / "a.toml"
    file.write_text('amp_dtype = "bfloat16"\nlayers = 4\noffload_reference = true\n')
    here = situation({})
    from_file = replace(here, config=Config.from_toml(file))
    assert without_effect(from_file) == "no effect here: --offload-reference (no --kl-coef)"
    typed = Config.from_cli(["--config", str(file), "--amp-dtype", "bfloat16", "--no-use-tf32"])
    assert without_effect(replace(here, config=typed)) == (
        "no effect here: --amp-dtype (no --use-amp), --offload-reference (no --kl-coef)"
    )


def test_a_run_says_it_once_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {**TINY, "max_steps": 1, "eval_every": 0, "use_tf32": True, "overlap_rewards": True}
    Trainer(Config.of(**options, out_dir=str(tmp_path / "run"))).fit()
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "no effect here" in line]
    assert "--use-tf32 (CPU)" in line and "--overlap-rewards (one rollout batch" in line
    assert "--eval-size-during (no evaluation between" in line
    assert "reward: 1 x similarity" in out.splitlines()[1]
    assert "step 1/1  reward " in out and "held out, step 1: exactly right " in out


def first_update(folder: Path, settings: Settings) -> tuple[dict[str, torch.Tensor], float]:
    """The weights after one step, and the tokens that it ran."""
    settings = {k: x for k, x in settings.items() if k not in ("device", "processes", "own")}
    config = Config.of(**{**BASE, **settings, "out_dir": str(folder)})
    trainer = Trainer(config, quiet=True)
    for step in range(2):
        metrics = trainer.learner.learn(trainer.source.batch(step), step)
    trainer.scorer.close()
    return trainer.model.state_dict(), metrics["tokens/run"]


BASE: Settings = {
    **{name: TINY[name] for name in ("max_steps", "learning_rate", "warmup_steps")},
    "prompts_per_step": 4,
    "group_size": 4,
    "max_new_tokens": 24,
    "temperature": 1.5,  # groups with unequal rewards
    "overlong_buffer": 8,
}
# what a run of two steps on a CPU can show
NUMERIC = [
    *("lora_alpha", "lora_targets"),
    *("reward_timeout", "arch", "layers", "width", "kv_heads", "context"),
    *("group_size", "top_k", "top_p", "min_p"),
    *("dynamic_sampling", "clip_low", "clip_high", "ratio_cap", "advantage", "scale", "kl"),
    *("overlong", "overlong_buffer", "sampler_correction", "sampler_correction_cap"),
    *("shuffle_rewards", "amp_dtype", "use_tf32", "skip_zero_variance_groups"),
    *("num_speculative_tokens", "num_reward_workers", "overlap_rewards", "chunked_logprobs"),
    *("offload_reference", "offload_optimizer", "share_prompt_kv"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMERIC)
def test_without_effect_means_that_the_weights_are_the_same_to_the_bit(
    name: str, tmp_path: Path
) -> None:
    for number, (idle, _) in enumerate(CASES[name]):
        if {"data", "own", "processes"} & idle.keys() or idle.get("task") == "own.py":
            continue
        if "rollout_batch_size" in idle or "micro_batch_size" in idle:
            idle = {k: min(x, 4) if k.endswith("batch_size") else x for k, x in idle.items()}
        without = {k: x for k, x in idle.items() if k != name}
        changed, tokens = first_update(tmp_path / f"with{number}", idle)
        plain, plain_tokens = first_update(tmp_path / f"without{number}", without)
        assert all(torch.equal(changed[key], plain[key]) for key in plain), idle
        assert tokens == plain_tokens


@pytest.mark.slow
def test_the_temperature_has_an_effect_on_the_supervised_loss(tmp_path: Path) -> None:
    hot, _ = first_update(tmp_path / "hot", {"loss": "nll", "temperature": 2.0})
    plain, _ = first_update(tmp_path / "plain", {"loss": "nll", "temperature": 1.0})
    assert any(not torch.equal(hot[key], plain[key]) for key in plain)
