"""Attempts at misuse of flags and config files: one line, exit code 2, before any work.

The ids name the attacks of the list that the cases come from; those without a number are like them.
"""

import io
import os
import sys
from pathlib import Path

import pytest

from minigrpo import Config
from minigrpo.runtime.flags import ConfigError, closed_pipe_is_no_error
from minigrpo.tools import cli

NINES = "9" * 5000


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr of a command line that must be refused."""
    with pytest.raises(SystemExit) as stop:
        Config.from_cli(argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out
    assert err.count("\n") == 1 and len(err) < 500
    assert "invalid literal" not in err and "could not convert" not in err
    return err


FLAGS = {
    "attack 28": (["--seed", "-1" + "0" * 400], "--seed must be at least 0 and at most"),
    "attack 28, nines": (["--seed", NINES], "--seed must be smaller, got '9999"),
    "attack 36": (["--draft-window", str(10**12)], "--num-speculative-tokens must be"),
    "attack 36, new name": (
        ["--num-speculative-tokens", str(10**12)],
        "--num-speculative-tokens must be at least 0 and at most 1024, got 1000000000000",
    ),
    "attack 36, threads": (["--num-reward-workers", "100000"], "at least 1 and at most 256"),
    "attack 37": (["--pg-timeout", "1e300"], "--pg-timeout must be at least 1 and at most"),
    "attack 37, tiny": (["--pg-timeout", "1e-9"], "--pg-timeout must be at least 1"),
    "attack 40": (["--seed", str(2**64), "--init-from", "scratch"], "--seed must be"),
    "attack 40, resume": (["--resume", "²", "--out-dir", "x"], "--resume must be auto or a step"),
    "resume, nines": (["--resume", NINES, "--out-dir", "x"], "--resume must be auto or a step"),
    "attack 45": (["--nope"], "unknown flag --nope; --help lists what is allowed"),
    "no- of a number": (["--no-seed"], "unknown flag --no-seed; did you mean --seed?"),
    "no- of a switch": (["--no-kv-cach"], "unknown flag --no-kv-cach; did you mean --no-kv-cache?"),
    "config is suggested": (["--confg", "a.toml"], "unknown flag --confg; did you mean --config?"),
    "a long unknown flag": (["--" + "x" * 5000], "unknown flag --xxx"),
    "a value for a switch": (
        ["--kv-cache=false"],
        "--kv-cache takes no value, got 'false'; --kv-cache turns it on, --no-kv-cache turns it",
    ),
    "a word for a switch": (
        ["--kv-cache", "false"],
        "'false' belongs to no flag; --kv-cache turns",
    ),
    "not an integer": (["--group-size", "many"], "--group-size must be a whole number, got 'many'"),
    "a fraction": (["--group-size", "2.5"], "--group-size must be a whole number, got '2.5'"),
    "not a number": (["--learning-rate", "x"], "--learning-rate must be a number, got 'x'"),
    "not a number or None": (["--clip-low", "x"], "--clip-low must be a number or None, got 'x'"),
    "infinite": (["--learning-rate", "inf"], "a number above 0 and finite, got inf"),
    "overflowing": (["--learning-rate", "1e999"], "a number above 0 and finite, got inf"),
    "nan": (["--grad-clip", "nan"], "--grad-clip must be a number above 0 and finite, got nan"),
    "denormal": (["--temperature", "1e-320"], "--temperature must be at least 0.001"),
    "min-p": (["--min-p", "1.5"], "--min-p must be at least 0 and at most 1, got 1.5"),
    "prompts without end": (["--prompts-per-step", str(10**12)], "at most 1000000"),
    "no value": (["--group-size", "--loss", "grpo"], "--group-size needs a value, a whole number"),
    "no file": (["--config"], "--config needs a value"),
    "a line break": (["--out-dir", "a\nb"], "--out-dir must be printable text, got 'a\\nb'"),
    "a NUL byte": (["--data", "a\0b"], "--data must be printable text"),
    "attack 27": (["--out-dir", os.fsdecode(b"a\xff")], "--out-dir must be printable text"),
    "a part twice": (["--reward-weights", "a=1,a=2"], "--reward-weights names a twice"),
    "a part without name": (["--reward-weights", "=1"], "--reward-weights must read part=number"),
    "a long file name": (["--config", "x" * 300], "cannot be read (File name too long)"),
    "a file name with a line break": (["--config", "a\nb"], "no such file or preset"),
    "a file name with a NUL byte": (["--config", "a\0b.toml"], "--config a\\x00b.toml: cannot be"),
    "short flag": (["-c", "x"], "'-c' belongs to no flag"),
    "sources": (
        ["--speculate", "answer,oracle"],
        "--speculate must be auto, none or a comma-separated list of answer, siblings, "
        "lookup, got 'oracle'",
    ),
    "an old name": (
        ["--draft-window", "0"],
        "--draft-window 0: --num-speculative-tokens must be at least 0 and at most 1024, got -1",
    ),
    "an old name, a bad choice": (["--layout", "x"], "--layout 'x': --packing must be repeated or"),
}


@pytest.mark.parametrize(("argv", "words"), FLAGS.values(), ids=FLAGS)
def test_a_bad_flag_is_refused(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(argv, capsys)


FILES = {
    "attack 25": ("a = " + "[" * 5000, "is not TOML"),
    "attack 28": (f"seed = {NINES}", "is not TOML"),
    "attack 28, hexadecimal": ("seed = 0x" + "f" * 5000, "--seed must be at least 0"),
    "attack 28, a float": ("learning_rate = 1" + "0" * 400, "above 0 and finite, got a number of"),
    "versions": ("versions = 1", "versions must be a table"),
    "a group that is no table": ("sampling = 5", "sampling must be a table, [sampling]"),
    "an unknown key": ("group-size = 4", "unknown key 'group-size'; did you mean group_size?"),
    "a bad value": ("group_size = 0", "--group-size must be at least 1"),
    "a bad type": ("group_size = [4]", "--group-size must be int, got [4]"),
    "a long text": (f'task = "{"x" * 5000}\\n"', "--task must be printable text"),
    "a combination": ("group_size = 1", "--group-size must be at least 2 with --loss grpo"),
    "infinite": ("grad_clip = inf", "--grad-clip must be a number above 0 and finite"),
    "an old name": ("draft_window = 0", "--draft-window 0: --num-speculative-tokens must be at"),
    "nothing": ("", "has no settings"),
    "a comment": ("# group_size = 4", "has no settings"),
    "a weight": ('[reward_weights]\nvalid = "big"', "--reward-weights must read part=number"),
}


@pytest.mark.parametrize(("toml", "words"), FILES.values(), ids=FILES)
def test_a_bad_file_is_refused_by_its_name(
    toml: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(toml)
    err = refused(["--config", str(path)], capsys)
    assert words in err and f"--config {path}" in err
    with pytest.raises(ConfigError) as error:
        Config.from_toml(path)
    assert err == f"error: {error.value}\n"


@pytest.mark.parametrize(
    ("toml", "flags", "expected"),
    [
        ("group_size = 1", ["--loss", "nll"], {"group_size": 1, "loss": "nll"}),
        ('resume = "auto"', ["--out-dir", "somewhere"], {"resume": "auto", "out_dir": "somewhere"}),
        (
            "low_precision_weights = true",
            ["--use-amp"],
            {"low_precision_weights": True, "use_amp": True},
        ),
        (
            "micro_batch_size = 24",
            ["--prompts-per-step", "48"],
            {"micro_batch_size": 24, "prompts_per_step": 48},
        ),
        ("width = 90", ["--heads", "5"], {"width": 90, "heads": 5}),
        ("profile = true\nmax_steps = 3", ["--max-steps", "6"], {"profile": True, "max_steps": 6}),
        ("cuda_graphs = true\nkv_cache = false", ["--kv-cache"], {"cuda_graphs": True}),
    ],
)
def test_a_flag_may_make_the_value_of_a_file_fit(
    toml: str, flags: list[str], expected: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "part.toml"
    path.write_text(toml)
    assert Config.from_cli(["--config", str(path), *flags]) == Config.of(**expected)
    assert Config.from_cli([*flags, "--config", str(path)]) == Config.of(**expected)


def test_two_files_are_checked_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one.toml", tmp_path / "two.toml"
    one.write_text("group_size = 1\n")
    two.write_text('loss = "nll"\n')
    both = ["--config", str(one), "--config", str(two)]
    assert Config.from_cli(both) == Config.of(group_size=1, loss="nll")
    err = refused([*both, "--loss", "dapo"], capsys)
    assert "--group-size must be at least 2 with --loss dapo, got 1" in err
    assert f"(with --config {one}, {two})" in err


def test_words_are_kept_as_they_are_typed(tmp_path: Path) -> None:
    """A folder named 007 must not become 7, nor may a value be taken for a flag of old."""
    config = Config.from_cli(["--out-dir", "007", "--data=layout", "--clip_low", "none"])
    assert config == Config.of(out_dir="007", data="layout")
    assert Config.from_cli(["--seed", "1", "--seed", "2"]).run.seed == 2
    marked = tmp_path / "marked.toml"
    marked.write_text("\ufeffgroup_size = 4\r\n", encoding="utf-8")
    assert Config.from_toml(marked).sampling.group_size == 4


def test_a_setting_under_its_old_and_its_new_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="packing is set twice, the second time as layout"):
        Config.of(packing="repeated", layout="tree")


def test_a_folder_as_config_says_which_file_was_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "rtx4090").mkdir()
    assert "--config run: is a folder, not a file\n" in refused(["--config", "run"], capsys)
    (tmp_path / "run" / "config.toml").touch()
    assert "did you mean run/config.toml?" in refused(["--config", "run"], capsys)
    (tmp_path / "run.v2").mkdir()
    assert "--config run.v2: is a folder" in refused(["--config", "run.v2"], capsys)
    assert Config.from_cli(["--config", "rtx4090"]).speed.use_tf32  # the folder hides no preset


class ClosedPipe(io.StringIO):
    """What stdout is once `head` has gone."""

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["evaluate", "--help"]])
def test_help_ends_quietly_when_its_reader_has_gone(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 0
    print("the interpreter writes to stdout once more as it exits", flush=True)
    assert not capsys.readouterr().err


def test_a_closed_pipe_hides_no_other_error() -> None:
    with pytest.raises(ConfigError), closed_pipe_is_no_error():
        raise ConfigError("an error")


def test_help_shows_config_in_a_box(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        Config.from_cli(["--help"])
    assert stop.value.code == 0
    assert "--config FILE " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["evaluate", "shipped", "--n", "many"], "--n must be a whole number, got 'many'"),
        (["sample", "shipped", "--temperature", "x"], "--temperature must be a number, got ['x']"),
        (["benchmark", "nosuch"], "NAME must be one of steps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_flag_of_a_tool_says_what_is_allowed(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and words in err and err.count("\n") == 1
    assert "python benchmark.py" not in err
