"""Settings: where they come from, which one wins, and what is refused."""

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from minigrpo.config import TRL_WORDS, Config, places
from minigrpo.model.shape import Size
from minigrpo.model.source import ModelSource
from minigrpo.settings import read_pairs
from minigrpo.tools.cli import run_command
from minigrpo.tools.models import ModelArguments
from minigrpo.types import ConfigError

from . import tiny
from .tiny import ROOT, refused


def test_flags_count_above_files_above_the_defaults(tmp_path: Path) -> None:
    first = tmp_path / "a.toml"
    first.write_text("group_size = 3\nmax_steps = 9\n")  # tables may be left out
    later = tmp_path / "b.toml"
    later.write_text('[task]\nname = "math"\n[sampling]\ngroup_size = 5\nprompts_per_step = 6\n')
    files = ["--config", str(first), "--config", str(later)]
    config = Config.from_cli(["--use-amp", *files, "--group-size", "7", "--no-parallel-rewards"])
    assert config.speed.use_amp
    assert not config.speed.parallel_rewards
    assert config.sampling.group_size == 7  # the flag
    assert Config.from_cli(files).sampling.group_size == 5  # the later file
    assert config.sampling.prompts_per_step == 6  # the files
    assert config.run.max_steps == 9
    assert config.sampling.temperature == 1.0  # the default


def test_a_published_model_brings_defaults_that_fit(tmp_path: Path) -> None:
    model = str(tiny.tiny_chat_model(tmp_path / "model", context=160))
    config = Config.of(model=model, task="math", data="x.jsonl")
    assert config.sampling.max_new_tokens == 80
    assert config.optimizer.learning_rate == 6e-4  # too small a model for another
    words = ["--model", model, "--task=math", "--data", "x.jsonl"]
    assert Config.from_cli(words) == config == Config.of(**config.flat())
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(tiny.toml(config))
    assert Config.of(model=str(run)).sampling.max_new_tokens == 80  # that of its own model
    assert Config.from_toml(run / "config.toml") == config
    (tmp_path / "model/model.safetensors").unlink()  # random weights are not published
    for other in (model, str(run), "scratch", str(tmp_path)):
        assert Config.of(model=other).replace(model="shipped") == Config()
    (run / "config.toml").write_text("a = ")
    for bad in ("nowhere/at-all", str(tmp_path / "none"), str(run)):
        refused(Config.of, model=bad)  # with the learning rate of small models it would break


def test_words_of_trl_are_refused_with_a_hint(tmp_path: Path) -> None:
    assert all(TRL_WORDS.values()) and not TRL_WORDS.keys() & places().keys()
    flags = re.findall("--([a-z0-9-]+)", " ".join(TRL_WORDS.values()))
    assert {flag.replace("-", "_") for flag in flags} <= places().keys()
    (tmp_path / "trl.toml").write_text("num_generations = 8\n")
    for words in (["--num-generations", "8"], ["--use_vllm=x"], ["--config", "trl.toml"]):
        with pytest.raises(ConfigError), contextlib.chdir(tmp_path):
            Config.from_cli(words)


words = st.from_regex(r"[a-z]+", fullmatch=True)
settings = st.fixed_dictionaries(
    {},
    optional={
        "group_size": st.integers(2, 64),
        "learning_rate": st.floats(1e-9, 1.0),
        "use_amp": st.booleans(),
        "clip_high": st.none() | st.floats(0, 3),
        "system": st.text(st.characters(exclude_categories=["Cs"])),
        "task_args": st.dictionaries(words, st.integers()),
        "chat_args": st.dictionaries(words, st.booleans() | st.sampled_from(["false", "1", ""])),
        "reward_weights": st.dictionaries(words, st.floats(-1, 1)),
    },
)


@given(settings)
def test_toml_round_trips(tmp_path_factory: pytest.TempPathFactory, given: dict[str, Any]) -> None:
    config = Config.of(**given)
    file = tmp_path_factory.mktemp("written") / "config.toml"
    file.write_text(tomli_w.dumps(config.model_dump(exclude_none=True)))
    assert Config.from_toml(file) == config


def test_pairs_are_separated_by_commas_and_chat_args_keep_their_types() -> None:
    assert read_pairs("sizes=2x12,3x12, n=2") == {"sizes": "2x12,3x12", "n": 2}
    assert Config.of(reward_weights="a=1,b=-0.5").task.reward_weights == {"a": 1.0, "b": -0.5}
    words = 'enable_thinking=false,name=x,1,n=3,off=False,list=[1, "a"],day=2024-01-02'
    values = {"enable_thinking": False, "name": "x,1", "n": 3, "off": False, "list": [1, "a"]}
    values["day"] = "2024-01-02"
    for config in (Config.from_cli(["--chat-args", words]), Config.of(chat_args=words)):
        assert config.model.chat_args == values
        assert config.replace(group_size=3).model.chat_args["enable_thinking"] is False
    refused(Config.of, chat_args="false")


@pytest.mark.parametrize(
    "bad",
    [
        {"group_size": 1},
        {"group_size": 1, "teacher": "self", "dynamic_sampling": 2},
        {"learning_rate": float("nan")},
        {"loss": "ppo"},
        {"groupsize": 8},
        {"sampling": 3},
        {"resume": "auto"},
        {"top_p": 0.9, "sampler_correction": "sequence-mask"},
        {"reward_weights": "similarity"},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, bad: dict[str, Any]) -> None:
    assert "\n" not in refused(Config.of, **bad)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in bad.items()]
    with pytest.raises(SystemExit) as ended:
        run_command("train", words, "minigrpo train")
    assert ended.value.code == 2
    (tmp_path / "bad.toml").write_text(tomli_w.dumps(bad))
    refused(Config.from_toml, tmp_path / "bad.toml")


def test_presets_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = SimpleNamespace(size=Size(500_000_000, 32768))
    monkeypatch.setattr(ModelSource, "of", lambda name: published)
    monkeypatch.chdir(tmp_path)
    for preset in ROOT.glob("configs/*.toml"):
        assert Config.from_toml(preset) == Config.from_cli(["--config", preset.stem])


def test_a_tilde_is_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny.tiny_chess_model(tmp_path / "model")
    paths = {
        "model": "~/model",
        "data": "~/b~1.jsonl,c.jsonl",
        "loss": "~/l.py:own",
        **dict.fromkeys(("eval_data", "rewards", "environment", "tokenizer", "out_dir"), "~/x"),
        **dict.fromkeys(("chat_template", "reference", "teacher", "resume", "task"), "~/x"),
    }
    expected = {name: path.replace("~/", f"{tmp_path}/") for name, path in paths.items()}
    paths["kl_coef"] = 0.1
    (tmp_path / "run.toml").write_text(tomli_w.dumps(paths))
    for config in (Config.of(**paths), Config.from_cli(tiny.flags(paths))):
        assert config.flat().items() >= expected.items()
    assert Config.from_toml("~/run.toml") == Config.of(**paths)
    arguments, _ = ModelArguments.parse(["~/model", "--data", "~/x"], "prog")
    assert arguments.run == str(tmp_path / "model")
    assert arguments.data == str(tmp_path / "x")
