import json
from pathlib import Path

import pytest

from minigrpo import Trainer, Transformer
from minigrpo.config import Config
from minigrpo.model.shape import ModelShape
from minigrpo.model.weights import export_model
from minigrpo.runtime import settings
from minigrpo.runtime.flags import ConfigError

from . import bpe, chat_model
from .gradients import TINY

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--grop-size", "4"], ["--grop-size", "did you mean --group-size"]),
        (["--group-size", "many"], ["--group-size", "many"]),
        (["--group-size", "1"], ["--group-size must be at least 2", "grpo"]),
        (["--group-size"], ["--group-size"]),
        (["--packing", "tall"], ["--packing", "repeated", "shared-prompt"]),
        (["--loss", "ppo"], ["--loss", "grpo", "nll"]),
        (["--learning-rate", "-1"], ["--learning-rate must be a number above 0", "-1"]),
        (["--learning-rate", "nan"], ["--learning-rate must be a number above 0", "nan"]),
        (["--temperature", "0"], ["--temperature must be at least 0.001"]),
        (["--kl-coef", "-0.1"], ["--kl-coef must be at least 0"]),
        (["--clip-low", "x"], ["--clip-low"]),
        (
            ["--micro-batch-size", "5"],
            ["--micro-batch-size must divide --prompts-per-step 16", "1, 2, 4, 8, 16"],
        ),
        (["--width", "100", "--heads", "3"], ["--width must be even and a multiple of --heads"]),
        (["--loss", "nll", "--kl-coef", "0.1"], ["--kl-coef must be 0 with --loss nll"]),
        (["--loss", "maxrl", "--overlong", "punish"], ["--scale mean", "--overlong punish"]),
        (
            ["--scale", "mean", "--kl-coef", "0.1", "--kl", "k1_reward"],
            ["--scale mean", "--kl k1_reward", "group, batch and none"],
        ),
        (["--weight-decay", "inf"], ["--weight-decay must be at least 0 and finite, got inf"]),
        (["--reward-weights", "valid=nan"], ["--reward-weights", "valid=nan"]),
        (["--resume", "auto"], ["--resume needs --out-dir"]),
        (["--resume", "last", "--out-dir", "x"], ["--resume must be auto or a step number"]),
        (["--reward-weights", "exact_fen"], ["--reward-weights", "part=number"]),
        (["--config", "nowhere.toml"], ["nowhere.toml", "No such file"]),
        (["--config"], ["--config needs a value"]),
        (["stray"], ["stray"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_command_line_is_one_line_and_exit_code_2(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        Config.from_cli(argv)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("group_sise = 4", ["group_sise", "did you mean group_size"]),
        ('group_size = "4"', ["--group-size must be int", "'4'"]),
        ("group_size = true", ["--group-size must be int"]),
        ("use_amp = 1", ["--use-amp must be bool"]),
        ('loss = "ppo"', ["--loss must be", "grpo", "'ppo'"]),
        ("group_size = ", ["not TOML"]),
        ("[loss]\ngroup_size = 4", ["group_size belongs in [sampling]"]),
        ("group_size = 4\n[sampling]\ngroup_size = 5", ["group_size is set twice"]),
        ('layout = "tree"\npacking = "repeated"', ["packing is set twice"]),
        ('draft_window = "4"', ["--num-speculative-tokens must be int", "'4'"]),
    ],
)
def test_a_bad_toml_file_is_an_error_that_names_the_key(
    tmp_path: Path, toml: str, words: list[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(toml)
    with pytest.raises(ConfigError) as error:
        Config.from_toml(path)
    for word in words:
        assert word in str(error.value)


def test_the_command_line_beats_the_file_and_the_file_beats_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(
        'group_size = 4\nlayout = "repeated"\nclip_high = 1\n'
        "[reward_weights]\nvalid = 0.5\nexact_fen = 2\n"
    )
    config = Config.from_cli(
        ["--packing", "shared-prompt", "--config", str(path), "--use-amp", "--no-kv-cache"]
    )
    changed = {
        "group_size": 4,
        "packing": "shared-prompt",
        "clip_high": 1,
        "use_amp": True,
        "kv_cache": False,
    }
    assert config == Config.of(reward_weights="valid=0.5,exact_fen=2", **changed)
    assert config.task.weights() == {"valid": 0.5, "exact_fen": 2.0}


def test_help_names_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        Config.from_cli(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for name, (group, _) in settings.places(Config).items():
        assert "--" + name.replace("_", "-") in out
        assert f"{group} options" in out


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem
)
def test_the_shipped_configs_load(path: Path) -> None:
    Config.from_toml(path)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem
)
def test_the_shipped_configs_make_a_step(path: Path, tmp_path: Path) -> None:
    """A dry run: the preset on the tiny model on this device, float16 and compilation left out
    where there is no GPU.
    """
    values = {**settings.read_settings(Config, path), **TINY, "out_dir": str(tmp_path / "run")}
    values |= {
        "prompts_per_step": 8,
        "max_steps": 1,
        "stop_after": 0,
        "eval_every": 0,
        "device": "cpu",
        "compile_model": False,
    }
    if path.stem in ("gpt2", "rookworld"):  # not at hand: small ones in the same formats
        values |= small_gpt2(tmp_path / "model")
    if values.get("task") == "math":
        values |= {"context": 256, "reward_weights": ""}
    if str(values.get("task")).startswith("countdown"):
        values["reward_weights"] = ""  # it has no part `similarity`
    if values.get("task") == "countdown-chat":  # its prompts are messages, for a chat model
        values["init_from"] = str(chat_model.write_model(tmp_path / "model", context=512))
    if values.get("data"):  # the user's own
        keys = ("question", "answer") if values.get("task") == "math" else ("prompt", "answer")
        values["data"] = str(write_sums(tmp_path / "sums.jsonl", keys))
    if values.get("task") == "code":  # the tiny model has no chat template
        values |= {"reward_weights": "", "system": "", "context": 512, "eval_samples": 1}
        values["eval_size"] = 2
        if "data" in values:
            values["data"] = str(write_problems(tmp_path / "mbpp.jsonl"))
    if values.get("task") in ("qa", "teach"):  # their prompts are messages, for a chat model
        model = chat_model.write_model(tmp_path / "model", context=1024)
        rows = [{"question": f"What is {i}?", "answer": str(i)} for i in range(40)]
        chat_model.write_lines(Path(values["data"]), rows)
        values |= {"init_from": str(model), "reward_weights": ""}
        values |= {"student": str(model)} if "student" in values else {}
    elif values.get("system"):
        template = tmp_path / "template.jinja"
        template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        values["chat_template"] = str(template)
    if values.get("amp_dtype") == "float16":
        with pytest.raises(ConfigError, match="--amp-dtype float16 needs a CUDA device"):
            Trainer(Config.of(**values), quiet=True)
        values["amp_dtype"] = "bfloat16"
    Trainer(
        Config.of(**{**values, "kl_coef": 0.0 if values.get("loss") == "nll" else 0.1}), quiet=True
    ).fit()
    written = "adapter_model.safetensors" if "lora_rank" in values else "model.safetensors"
    assert (tmp_path / "run" / written).exists()


def write_sums(path: Path, keys: tuple[str, str]) -> Path:
    """Sums in a JSONL file, which ends in the form of GSM8K whatever the keys are."""
    rows = [(f"{a}+{b}=", f"#### {a + b}") for a in range(9) for b in range(9)]
    pairs = [dict(zip(keys, row, strict=True)) for row in rows]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def write_problems(path: Path) -> Path:
    problem = {"code": "def f(x): return x", "test_list": ["assert f(1) == 1"]}
    lines = [json.dumps({"text": f"Write {number}.", **problem}) for number in range(60)]
    path.write_text("\n".join(lines))
    return path


def small_gpt2(folder: Path) -> dict[str, str]:
    """A random model and a learnt vocabulary, in one folder as Hugging Face has them."""
    bpe.write_gpt2(folder, bpe.chess_merges(), ("merges.txt", "vocab.json"))
    shape = ModelShape(256 + 60 + 1, context=256, layers=1, width=16, heads=2)
    export_model(Transformer(shape).state_dict(), folder, shape=shape, eos=shape.vocab_size - 1)
    return {"init_from": str(folder), "tokenizer": str(folder)}


def test_several_files_are_laid_over_each_other(tmp_path: Path) -> None:
    job, card = tmp_path / "job.toml", tmp_path / "card.toml"
    job.write_text("max_steps = 7\nmicro_batch_size = 4\n")
    card.write_text("micro_batch_size = 2\n")
    config = Config.from_cli(["--config", str(job), "--config", str(card)])
    assert (config.run.max_steps, config.memory.micro_batch_size) == (7, 2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["--layout", "repeated"], {"packing": "repeated"}),
        (["--layout=shared"], {"packing": "shared-prompt"}),
        (["--no-draft-answers"], {"speculative_decoding": False}),
        (["--draft-window", "5"], {"num_speculative_tokens": 4}),
        (["--no-skip-dead-groups"], {"skip_zero_variance_groups": False}),
        (["--resample-dead-groups", "2"], {"dynamic_sampling": 2}),
        (["--task", "policy"], {"task": "best-move"}),
        (["--task=chess-env+policy"], {"task": "chess-env+best-move"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_old_names_are_still_read(old: list[str], new: dict[str, object], tmp_path: Path) -> None:
    """As flags, as TOML keys and in Python. A written config has the new names."""
    expected = Config.of(**new)
    assert Config.from_cli(old) == expected != Config()
    name, _, value = " ".join(old).replace("=", " ").removeprefix("--").partition(" ")
    key = name.removeprefix("no-").replace("-", "_")
    typed: object = value or not name.startswith("no-")
    if isinstance(typed, str) and typed.isdecimal():
        typed = int(typed)
    assert Config.of(**{key: typed}) == expected
    (tmp_path / "old.toml").write_text(f"{key} = {json.dumps(typed)}\n")
    assert Config.from_toml(tmp_path / "old.toml") == expected
    assert not any(word in " ".join(settings.toml_lines(expected)) for word in ("draft", "layout"))


def test_a_file_with_tables_and_a_flat_one_mean_the_same(tmp_path: Path) -> None:
    grouped, flat = tmp_path / "grouped.toml", tmp_path / "flat.toml"
    grouped.write_text(
        '[task]\nname = "best-move"\nreward_weights = {best = 1.0}\n'
        '[loss]\nname = "dapo"\nclip_high = 0.3\n[sampling]\ngroup_size = 4\n'
    )
    flat.write_text(
        'task = "best-move"\nloss = "dapo"\nclip_high = 0.3\ngroup_size = 4\n'
        "[reward_weights]\nbest = 1.0\n"
    )
    config = Config.from_toml(grouped)
    assert config == Config.from_toml(flat) != Config()
    assert config.loss.name == "dapo" and config.task.weights() == {"best": 1.0}
    written = tmp_path / "written.toml"
    written.write_text("\n".join(settings.toml_lines(config)))
    assert Config.from_toml(written) == config and "[sampling]" in written.read_text()


def test_a_preset_is_found_by_its_name() -> None:
    assert Config.from_cli(["--config", "chess-long"]).run.max_steps == 1300
    assert Config.from_cli(["--config", "rtx4090"]) == Config.from_toml(
        ROOT / "configs" / "rtx4090.toml"
    )
