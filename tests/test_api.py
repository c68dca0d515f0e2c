"""`minigrpo.train`: objects in place of names and files, and the run that it returns."""

import math
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import minigrpo
from minigrpo.config import Config
from minigrpo.defaults import Size, settings_for
from minigrpo.metrics import Graded, headline
from minigrpo.model.transformer import ModelShape
from minigrpo.parts import Given, Parts
from minigrpo.resolve import resolve
from minigrpo.tools.cli import main
from minigrpo.tools.doctor import RIGHT_SHARE, diagnose
from minigrpo.tools.runs import read_run
from minigrpo.types import REWARD, ConfigError, Example, RewardTable

from . import tiny
from .test_tools import call

ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": f"{i} + 1?"}], "solution": i + 1} for i in range(40)
]
SIZES: dict[str, Any] = {**tiny.TINY, "reward_weights": {}, "quiet": True}


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


def weights(folder: Path) -> dict[str, Any]:
    return {name: x.tolist() for name, x in load_file(folder / "model.safetensors").items()}


def test_a_run_returns_what_it_logged(run: Any) -> None:
    assert run.summary["status"] == "finished" and (run.folder / "summary.json").is_file()
    assert run.metrics["step"] == [1, 2, 3, 4] and run.evaluations["step"] == [0, 2, 4]
    own = [f"rewards/{name}/mean" for name in ("digits", "solved")]
    first, second = (np.array(run.metrics[name]) for name in own)
    assert np.allclose(run.metrics["reward"], first + 0.5 * second)  # nothing else is paid
    assert len(run.sample("3 + 1?", 2)) == 2
    assert run.sample("3 + 1?") == run.sample([{"role": "user", "content": "3 + 1?"}])
    assert sum(x.numel() for x in run.model.state_dict().values())


def test_without_answers_the_reward_is_the_headline(run: Any) -> None:
    found = read_run(run.folder, print)
    assert found.success == headline(found.evaluations[-1]) == REWARD
    assert "exact" not in run.evaluations and math.isnan(found.shares[-1].low)
    last = float(found.overview()[3])
    assert last == pytest.approx(run.evaluations["reward_sampled"][-1], abs=1e-3)
    assert RIGHT_SHARE not in [rule.series for rule, _ in diagnose(found)]


def test_a_resume_needs_the_objects_and_is_bit_equal(run: Any, model: str, tmp_path: Path) -> None:
    def go(data: Any = ROWS, rewards: Any = (digits, solved), **settings: Any) -> Any:
        return minigrpo.train(
            model=model, data=data, rewards=rewards, out_dir=tmp_path, **SIZES, **settings
        )

    assert go(stop_after=2).summary["status"] == "stopped"
    heavier = minigrpo.reward(weight=5)(solved.function)
    for changed in ({"data": ROWS[1:]}, {"rewards": [digits]}, {"rewards": [digits, heavier]}):
        with pytest.raises(ConfigError):
            go(resume="auto", **changed)
    flags = ["--config", f"{tmp_path}/config.toml", "--out-dir", str(tmp_path), "--resume", "auto"]
    for command in (["train", *flags], ["evaluate", str(tmp_path)]):
        assert call(*command) == 2
    assert go(resume="auto").summary["step"] == 4
    assert weights(tmp_path) == weights(run.folder)
    main(["sample", str(tmp_path), "--prompt", "3 + 1?", "--n", "1"])  # needs no objects


def test_tasks_and_models_may_be_objects_and_callbacks_see_each_step(tmp_path: Path) -> None:
    from minigrpo.tasks.chess_env import ChessEnv

    model = minigrpo.Transformer.from_pretrained(tiny.tiny_chess_model(tmp_path / "model"))
    seen: list[int] = []
    sizes = {**SIZES, "reward_weights": {"similarity": 1.0}}
    for name, task in {"class": ChessEnv, "object": ChessEnv(0)}.items():
        run = minigrpo.train(
            model=model,
            task=task,
            out_dir=tmp_path / name,
            callbacks=[lambda step, metrics: seen.append(step)],
            **sizes,
        )
    assert seen == [1, 2, 3, 4, 1, 2, 3, 4] and run.model is model
    assert "python:ChessEnv" in (run.folder / "config.toml").read_text()
    with pytest.raises(ConfigError):  # the model is no longer that of the start
        minigrpo.train(model=model, task=task, out_dir=run.folder, resume="auto", **sizes)


@pytest.mark.parametrize(
    ("data", "functions", "task", "args", "paid"),
    [
        ("", (), "chess-env", {}, {}),
        ("games.pgn,more.txt", (), "chess-env", {}, {}),
        ("", (digits, solved), "chess-env", {}, {"digits": 1.0, "solved": 0.5}),
        ("rows.jsonl", (), "prompts", {}, {}),
        ("rows.jsonl", (digits,), "prompts", {"judge": "none"}, {}),
        (ROWS, (digits,), "prompts", {"judge": "none"}, {}),
    ],
)
def test_task_auto(
    data: Any, functions: Any, task: str, args: Mapping[str, str], paid: Mapping[str, float]
) -> None:
    given = {"data": data} if isinstance(data, str) else {}
    objects = Given.of(rewards=functions, data=None if given else data)
    config = resolve(Config.of(**given), objects)
    assert (config.task.name, config.task.task_args) == (task, args)
    assert config.task.reward_weights == paid
    assert resolve(config) == resolve(config, objects) == config  # as a resumed run has it


def test_what_is_right_can_be_said_by_a_function() -> None:
    rewards = RewardTable(np.array([[0.7, 0.2]]), {"solved": np.array([[1.0, 0.0]])})
    examples, texts = [Example("a")], [["4", "5"]]
    said = Graded(examples, texts, rewards, "solved")
    assert said.right.tolist() == [[1, 0]] and [*said.measures] == ["solved", "reward"]
    unsaid = Graded(examples, texts, rewards, REWARD)
    assert np.isnan(unsaid.right).all() and [*unsaid.measures] == ["reward", "solved"]
    assert np.array_equal(unsaid.measures["reward"], rewards.total.mean(1))


class Counter:
    """A callable object."""

    def __call__(self, example: Example, text: str) -> float:
        return float(len(text))


def test_rewards_are_any_callables_of_the_right_form() -> None:
    (made,) = Parts(Config(), given=Given.of(rewards=Counter())).functions
    assert made.name == "Counter" and made.values([Example("a")], ["abc"]).tolist() == [3]
    wrong: list[Callable[..., Any]] = [
        lambda prompts, completions, **columns: [0.0],
        lambda text: 0.0,
    ]
    for function, options in ((wrong[0], {}), (wrong[1], {}), (made.function, {"tokens": True})):
        with pytest.raises(ConfigError):
            minigrpo.reward(**options)(function)


def test_a_reward_that_never_works_ends_the_run(model: str, tmp_path: Path) -> None:
    def broken(example: Example, text: str) -> float:
        return float(example.fields["no such column"])

    with pytest.raises(ConfigError):
        minigrpo.train(model=model, data=ROWS, rewards=[digits, broken], out_dir=tmp_path, **SIZES)
    assert not (tmp_path / "eval.jsonl").read_text()  # its zeros would be the first of the curve


def test_ctrl_c_ends_the_script_when_the_run_is_saved(model: str, tmp_path: Path) -> None:
    def interrupt(step: int, metrics: Mapping[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    job = {"model": model, "data": ROWS, "rewards": digits, "out_dir": tmp_path, **SIZES}
    with pytest.raises(KeyboardInterrupt):
        minigrpo.train(**job, callbacks=[interrupt])
    assert (tmp_path / "checkpoints" / "step_000001").is_dir()
    assert minigrpo.train(**job, resume="auto").summary["step"] == 4


def test_a_transformer_gets_the_defaults_of_its_size() -> None:
    class Large:
        shape = ModelShape(10, 4096)

        def parameters(self) -> list[Any]:
            return [SimpleNamespace(numel=lambda: 500_000_000)]

    fitted = settings_for(Size.of(Large()), {"lora_rank": 4})
    assert fitted["learning_rate"] == 1e-5 and fitted["max_new_tokens"] == 512


SCRIPT = """
import sys
import minigrpo
from tests.test_api import ROWS, SIZES, digits, solved
for folder in sys.argv[2:]:
    minigrpo.train(model=sys.argv[1], data=ROWS, rewards=[digits, solved], out_dir=folder, **SIZES)
"""


@pytest.mark.slow
def test_torchrun_runs_the_same_script(run: Any, model: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    (tmp_path / "script.py").write_text(SCRIPT)
    folders = [str(tmp_path / name) for name in ("a", "b")]
    subprocess.run(
        [*tiny.TORCHRUN, str(tmp_path / "script.py"), model, *folders],
        env={**os.environ, "PYTHONPATH": str(root)},
        timeout=120,
        check=True,
    )
    one, *two = (load_file(Path(f) / "model.safetensors") for f in (run.folder, *folders))
    for name, x in one.items():
        assert all(np.allclose(x, other[name], atol=1e-4) for other in two)
