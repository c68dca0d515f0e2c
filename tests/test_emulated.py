"""Runs on an emulated CUDA device, under each option and task, beside the same on the CPU.

    python -m tests.test_emulated FOLDER [NAME ..]      with emulated.cpp preloaded

prints a line of JSON for each. With --cuda-graphs, rounds run again kernel by kernel. Left out:
--compile-model, which would compile for a real device.
"""

import json
import math
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from minigrpo import Config, Trainer
from minigrpo.learner import Learner
from minigrpo.model.shape import AttentionShape, ModelShape, Rope
from minigrpo.model.transformer import Transformer
from minigrpo.sampling import generate, sampler
from minigrpo.sampling.generate import Generation

from .emulated import EmulatedDevice, emulated
from .steps import DELTA, SHAPES, attending
from .test_resume import lines
from .tiny import ROOT, TINY, read_json, tiny_chat_model, tiny_chess_model

SUMS = {"task": "prompts", "data": str(ROOT / "examples" / "sums.jsonl"), "kl_coef": 0.1}
OPTIONS = {
    "default": {"kl_coef": 0},
    "plain": {"packing": "repeated", "num_speculative_tokens": 0, "fused_optimizer": False},
    "memory": {"gradient_checkpointing": True, "micro_batch_size": 1, "rollout_batch_size": 2}
    | {"offload_reference": True, "offload_optimizer": True, "parallel_rewards": False},
    "iterations": {"num_iterations": 2, "kl": "k3_is", "loss": "gspo", "micro_batch_size": 2},
    "truncated": {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "sampler_correction": "icepop"},
    "stop": {"stop": ["1", "23"], "overlong": "mask", "loss": "maxrl", "eval_samples": 4},
    "entropy": {"entropy_coef": 0.01, "weight_decay": 0.1, "loss": "cispo"},
    "teacher": {"teacher": "OTHER", "sampler_correction": "sequence-truncate"},
    "self": {"teacher": "self", "teacher_context": "answer", "group_size": 1, "kl_coef": 0},
    "reference": {"reference": "OTHER", "base_dtype": "bfloat16", "kl": "k2", "loss": "dapo"}
    | {"shuffle_rewards": True},
    "dynamic": {"dynamic_sampling": 2, "loss": "rloo", "sampler_correction": "token-mask"},
    "sft": {"loss": "nll", "kl_coef": 0, "micro_batch_size": 2},
    "chat": {"model": "CHAT", "system": "Add.", "loss": "dr_grpo"},
    "lora": {"lora_rank": 2, "num_iterations": 2, "offload_reference": True},
    "nf4": {"lora_rank": 2, "base_dtype": "nf4", "gradient_checkpointing": True},
    "windows": {"model": "GEMMA", "kl_coef": 0.1, "gradient_checkpointing": True},
    "windows-lora": {"model": "GEMMA", "lora_rank": 2, "packing": "repeated", "use_amp": True},
    "states": {"model": "HYBRID", "gradient_checkpointing": True, "micro_batch_size": 2},
    "states-amp": {"model": "HYBRID", "use_amp": True, "lora_rank": 2, "base_dtype": "nf4"},
    "amp": {"use_amp": True, "gradient_checkpointing": True, "offload_reference": True},
    "amp-lora": {"use_amp": True, "lora_rank": 2, "base_dtype": "bfloat16", "model": "CHAT"},
    "amp-nf4": {"use_amp": True, "lora_rank": 2, "base_dtype": "nf4", "micro_batch_size": 2},
    "float16": {"use_amp": True, "amp_dtype": "float16", "offload_optimizer": True},
    "graphs": {"cuda_graphs": True, "rollout_batch_size": 2},
    "graphs-states": {"cuda_graphs": True, "model": "HYBRID", "num_speculative_tokens": 0},
    "many-layers": {"model": "QWEN", "use_amp": True, "kl_coef": 0, "num_speculative_tokens": 0},
}
TASKS = {
    "chess": {"task": "examples/chess_games.py", "data": "tests/golden/games.pgn"},
    "tool": {"task": "examples/countdown_tool.py", "tokenizer": "dialogue", "max_new_tokens": 24}
    | {"model": "minigrpo/assets/countdown-tool.safetensors"},
    "guess": {"task": "examples/guess.py", "tokenizer": "dialogue"}
    | {"model": "minigrpo/assets/guess.safetensors"},
    "calibration": {"task": "examples/calibration.py"}
    | {"model": "minigrpo/assets/hidden-digit.safetensors"},
    "one-liners": {"task": "examples/one_liners.py", "model": "minigrpo/assets/code.safetensors"},
    "rlt": {"task": "examples/rlt.py", "model": "minigrpo/assets/teacher.safetensors"},
    "countdown": {"task": "examples/countdown.py"}
    | {"model": "minigrpo/assets/countdown.safetensors"},
    "math": {"task": "examples/sums.py", "model": "minigrpo/assets/math.safetensors"},
}
# The most launches of a round and of an update: a tenth above what was counted with two layers.
# One layer more adds 28 to a round (plain 25, LoRA 44, with NF4 60) and 183 to an update (plain
# 222, LoRA 196 per iteration, NF4 with checkpointing 285).
LAUNCHES = {"default": (152, 600), "plain": (118, 722), "lora": (187, 1232), "nf4": (225, 800)}
# CUDA has kernels of its own for attention, and for the norms and first moments of all weights.
LAUNCHES |= {"many-layers": (900, 7100)}
# Host reads of an update are two: whether it is finite, and its metrics. More are for iterations,
# their old log-probs, moments that move to the host, the scale of float16.
READS = {"iterations": 5, "lora": 4, "guess": 6, "memory": 3, "float16": 6}
DIALOGUES = "guess", "tool"
# as many layers, and all kinds of parts, as Qwen2.5-0.5B
QWEN = ModelShape(
    vocab_size=360,
    context=192,
    layers=attending(24, rope=Rope(1e6)),
    width=16,
    heads=4,
    family="qwen2",
    mlp_width=24,
    kv_heads=2,
)


def settings(name: str, folder: Path) -> dict[str, Any]:
    """Those of a case, with its models."""
    small = {
        **TINY,
        "learning_rate": 1e-3,  # with larger steps AdamW makes differences of rounding real
        "eval_size": 2,
        "eval_every": 0,
        "max_steps": 3,
        "cuda_graphs": False,
    }
    if name in TASKS:
        small |= {"model": "shipped", "reward_weights": {}, "prompts_per_step": 2}
        return small | {"max_new_tokens": 12} | TASKS[name]
    models = {
        "TWO LAYERS": tiny_chess_model(folder / "model"),
        "OTHER": tiny_chess_model(folder / "other"),
        "CHAT": tiny_chat_model(folder / "chat"),
        "GEMMA": folder / "gemma",
        "HYBRID": folder / "hybrid",
        "QWEN": folder / "qwen",
    }
    layers = (DELTA, AttentionShape(rope=Rope(50.0, fraction=0.5)))
    hybrid = replace(SHAPES["hybrid"], vocab_size=360, context=192, layers=layers)
    Transformer(hybrid).export(models["HYBRID"])
    Transformer(replace(SHAPES["grouped-query"], vocab_size=360, context=192)).export(
        models["GEMMA"]
    )
    Transformer(QWEN).export(models["QWEN"])
    config = models["TWO LAYERS"] / "config.json"
    config.write_text(json.dumps({**read_json(config), "n_layer": 2}))
    case = {"model": "TWO LAYERS", "max_new_tokens": 4, **SUMS, **OPTIONS[name]}
    return small | {x: str(models.get(str(value), value)) for x, value in case.items()}


def run(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    """Evaluate, train for two steps, save; load, train for one more, evaluate. Returns its logs."""
    given = {**settings, "out_dir": str(folder)}
    Trainer(Config.of(**given, stop_after=2), quiet=True).fit()
    given |= {"resume": "auto", "fused_optimizer": True}
    Trainer(Config.of(**given), quiet=True).fit()
    names = ("metrics", "eval", "samples", "held_out")
    return [line for name in names for line in lines(folder, f"{name}.jsonl")]


@contextmanager
def counting(device: EmulatedDevice, owner: type, method: str) -> Iterator[Counter[str]]:
    """The largest counts of a call of a method."""
    function, most = getattr(owner, method), Counter()

    def counted(*args: Any) -> Any:
        before = device.totals()
        result = function(*args)
        most.update((device.totals() - before) - most)
        return result

    with patch.object(owner, method, counted):
        yield most


def differences(x: Any, y: Any, atol: float, path: str = "") -> Iterator[str]:
    """Where two values that JSON can hold differ by more than rounding."""
    if isinstance(x, dict | list) and type(x) is type(y) and len(x) == len(y):
        for name in x if isinstance(x, dict) else range(len(x)):
            yield from differences(x[name], y[name], atol, f"{path}/{name}")
        return
    is_close = isinstance(x, float) and math.isclose(x, y, rel_tol=1e-3, abs_tol=atol)
    if x != y and not is_close:
        yield f"{path}: {x} {y}"


def compare(
    name: str, logs: list[dict[str, Any]], given: dict[str, Any], folder: Path, atol: float = 1e-5
) -> None:
    """With those of a CPU; autocast rounds differently there."""
    losses = [line["loss"] for line in logs if "loss" in line]
    assert len(losses) == 3
    assert all(map(math.isfinite, losses)), losses
    if "use_amp" not in given:
        with patch.object(generate, "FEWEST_PER_ROUND", 0):  # no proposals rest, as on a device
            found = [*differences(run(folder / "cpu", **given, device="cpu"), logs, atol)]
        if name in DIALOGUES:  # threads answer, one round earlier or later
            found = [difference for difference in found if "/rollout/" not in difference]
        assert not found


def check(name: str, folder: Path) -> None:
    """No mixed devices, the CPU's numbers, and no more work for the host than is written down."""
    given = settings(name, folder)

    def capture(run_round: Callable[[], None]) -> Callable[[], None]:
        run_round()
        return run_round

    with (
        emulated() as device,
        patch.object(sampler, "capturing", lambda: capture),
        counting(device, Generation, "_round") as in_round,
        counting(device, Generation, "_update") as between_rounds,
        counting(device, Learner, "learn") as in_update,
    ):
        logs = run(folder / "cuda", **given, device="cuda")
    compare(name, logs, given, folder)
    assert not in_round["reads"], device.reads
    assert not in_round["uploads"], device.uploads
    of_texts = name in ("stop", *DIALOGUES)  # the host reads stop texts, and turns
    assert between_rounds["reads"] <= 1 + of_texts, device.reads
    assert in_update["reads"] <= READS.get(name, 2), device.reads
    most_in_round, most_in_update = LAUNCHES.get(name, (math.inf, math.inf))
    assert in_round["launches"] <= most_in_round
    assert in_update["launches"] <= most_in_update


def check_control() -> None:
    """There is something to find: mixed devices are refused, and what is done is counted."""
    with emulated() as device:
        there = torch.arange(4.0, device="cuda")
        for mixed in (
            lambda: there + torch.ones(4),
            lambda: torch.cat([there, torch.tensor([1.0])]),
            lambda: torch.nn.functional.embedding(torch.tensor([1]), there[:, None]),
        ):
            with pytest.raises(RuntimeError, match="different devices"):
                mixed()
        there += torch.tensor(1.0)  # a number may come from the host
        assert there[torch.tensor([2])].is_cuda
        assert there.sum().item() == 10
        assert there[there > 2].tolist() == [3, 4]
    assert device.totals() == {"launches": 5, "uploads": 1, "reads": 3}, device.totals()


def main(folder: Path, *names: str) -> None:
    os.environ.pop("LD_PRELOAD")  # of processes that run users' code
    for name in names or ("control", *OPTIONS, *TASKS):
        error = ""
        try:
            check_control() if name == "control" else check(name, folder / name)
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"name": name, "error": error}), flush=True)


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What `main` prints, by name."""
    if torch.version.cuda:
        pytest.skip("this build of torch has itself what is emulated")
    folder = tmp_path_factory.mktemp("emulated")
    library = str(folder / "emulated.so")
    parts = Path(torch.__file__).parent
    compiler = ["g++", "-std=c++20", "-shared", "-fPIC", "tests/emulated.cpp", "-o", library]
    compiler += [f"-I{parts}/include", f"-L{parts}/lib", f"-Wl,-rpath,{parts}/lib"]
    subprocess.run([*compiler, "-lc10", "-ltorch_cpu"], cwd=ROOT, check=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.test_emulated", str(folder)],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": library},
        stdout=subprocess.PIPE,
        check=True,
    )
    return {case["name"]: case["error"] for case in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["control", *OPTIONS, *TASKS])
def test_a_run_on_an_emulated_device(errors: dict[str, str], name: str) -> None:
    assert not errors[name], errors[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*OPTIONS, *TASKS])
def test_a_run_on_a_gpu(tmp_path: Path, name: str) -> None:
    given = settings(name, tmp_path) | {"cuda_graphs": True}
    logs = run(tmp_path / "cuda", **given, device="cuda")
    compare(name, logs, given | {"cuda_graphs": False}, tmp_path, atol=5e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
