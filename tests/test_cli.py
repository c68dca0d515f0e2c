"""The command `minigrpo`: from a checkout, and from a wheel in an empty folder."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from minigrpo.tools import cli

ROOT = Path(__file__).parent.parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
FRESH = {name: value for name, value in ENV.items() if name != "PYTHONPATH"}  # sees no checkout
IN_THE_WHEEL = (
    "README.md",
    "LICENSE",
    "pyproject.toml",
    "grpo.py",
    "minigrpo",
    "benchmarks",
    "configs",
)


def test_help_lists_every_command_in_one_line_without_waiting_for_torch() -> None:
    code = "import sys, minigrpo.tools.cli as c; c.main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *lines, torch_is_imported = done.stdout.splitlines()
    assert torch_is_imported == "False"
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert listed == list(cli.COMMANDS)
    assert all(len(line) <= 80 for line in lines)


def test_without_a_command_it_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([])
    assert capsys.readouterr().out == cli.usage()


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "benchmark"])
def test_each_command_has_a_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert out.startswith(f"usage: minigrpo {name} ")
    module = import_module(f"minigrpo.tools.{name}")
    if not name.startswith(("train", "plan")):  # their help begins with the config's description
        first = (module.__doc__ or "").splitlines()[0].split()
        assert " ".join(first[:6]) in " ".join(out.split())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], "minigrpo has no command 'trian'; did you mean train?"),
        (["zzz"], "minigrpo has no command 'zzz'; --help lists what is allowed"),
        (["--max-steps", "2"], "minigrpo has no command '--max-steps'"),
        (["train", "--max-step", "2"], "unknown flag --max-step; did you mean --max-steps?"),
        (["train", "--config", "rtx409"], "--config rtx409: no such file or preset; presets: "),
        (["plan", "--max-new-tokens", "256"], "--max-new-tokens must leave room for a prompt"),
        (["evaluate", "nowhere"], "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out
    assert words in err and err.count("\n") == 1


def test_a_process_that_cannot_join_the_others_says_why_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """WORLD_SIZE by itself: somebody's environment, but not torchrun's."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--max-steps", "1"])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert "variable RANK expected" in err and err.count("\n") == 1


def test_plan_prints_an_estimate_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tables = []
    for argv in (["plan"], ["train", "--plan"]):
        cli.main([*argv, "--group-size", "4", "--prompts-per-step", "2"])
        rows = [line.split("│") for line in capsys.readouterr().out.splitlines()]
        tables.append({row[1].strip(): row[2:4] for row in rows if len(row) == 5})
    planned, again = tables
    assert {"tokens: rollout", "MiB: peak", "seconds: rollout", "seconds: step"} <= set(planned)
    for name in planned:
        assert "seconds" in name or planned[name] == again[name]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["train.py", "distributed_train.py"])
def test_the_scripts_are_the_command_and_say_their_own_name(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert stop.value.code == 0 and capsys.readouterr().out.startswith(f"usage: {script} ")
    assert len((ROOT / script).read_text().splitlines()) <= 10


# --- from a wheel ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a fresh environment with the wheel in it.

    torch and the other dependencies are those of the running interpreter, found by a .pth file. The
    wheel comes first on the path, and an editable minigrpo there is not found, because Python does
    not follow one .pth file to the next.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # not the checkout: a build leaves files where it runs
    source.mkdir()
    for name in IN_THE_WHEEL:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "--no-deps", "--quiet", "--wheel-dir", folder, source]
    subprocess.run(build, env=FRESH, check=True)
    (wheel,) = folder.glob("minigrpo-*.whl")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    install = [*pip, "--python", python, "install", "--no-deps", "--quiet", wheel]
    subprocess.run(install, env=FRESH, check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent / "minigrpo"


@pytest.mark.wheel
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train --max-steps 2 --eval-size 8 --eval-every 0", "finished (max_steps) at step 2"),
        (
            "train --config rtx4090 --device cpu --no-compile-model --max-steps 1 --eval-size 8",
            "finished (max_steps) at step 1",
        ),
        ("plan", "MiB: peak"),
        ("evaluate shipped --n 8", "95 % confidence intervals"),
        ("sample shipped --examples 1", "truth       "),
        ("export shipped --out model", "shipped -> model"),
        ("benchmark --help", "usage:"),
        *((f"{name} --help", f"usage: minigrpo {name} ") for name in ("curves", "annotate")),
        ("--help", "usage: minigrpo COMMAND"),
    ],
)
def test_a_wheel_in_an_empty_folder(installed: Path, tmp_path: Path, line: str, words: str) -> None:
    done = subprocess.run(
        [installed, *line.split()], cwd=tmp_path, env=FRESH, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


@pytest.mark.wheel
def test_a_wheel_has_the_presets_and_the_plain_algorithm(installed: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"cwd": tmp_path, "env": FRESH, "capture_output": True, "text": True}
    done = subprocess.run([installed, "train", "--config", "nope"], **options)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    listed = done.stderr.split("presets: ")[1].strip().split(", ")
    assert listed == sorted(path.stem for path in (ROOT / "configs").glob("*.toml"))
    code = "import grpo, minigrpo_benchmarks, minigrpo; print(minigrpo.__file__)"
    done = subprocess.run([installed.parent / "python", "-c", code], **options)
    assert done.returncode == 0, done.stderr
    package = Path(done.stdout.strip()).parent
    assert package.is_relative_to(installed.parent.parent) and (package / "py.typed").exists()


def test_every_package_is_in_the_wheel() -> None:
    """A new room that pyproject.toml does not list would be missing from the wheel only."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent for path in (ROOT / "minigrpo").rglob("*.py")}
    names = {".".join(path.relative_to(ROOT).parts) for path in folders}
    assert {
        name for name in setuptools["packages"] if name not in setuptools["package-dir"]
    } == names
