"""Attempts at misuse of the tools: one line that names the flag or the file, and nothing is lost.

"attack 22" and its like are numbers of a list of attempts that once succeeded.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors import SafetensorError

from minigrpo import Config, Trainer
from minigrpo.model import weight_files
from minigrpo.rewards import RewardScorer
from minigrpo.runtime.checkpoint import load_checkpoint, path_of, save_checkpoint
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.measures import OTHER_EXAMPLES
from minigrpo.tools import (
    annotate,
    compare,
    curve_tables,
    curves,
    doctor,
    evaluate,
    export,
    loading,
    plan,
    sample,
    train,
)
from minigrpo.tools.messages import one_line_errors
from minigrpo.tools.records import read_records

from .gradients import TINY

GOOD = (
    '{"step": 0, "n": 8, "exact": 0.25, "brier": null}\n'
    '{"step": 9, "n": 8, "exact": 0.5, "brier": null}\n'
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint per step. Tests work on copies."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    options = {**TINY, "max_steps": 2, "save_every": 1, "eval_every": 0, "context": 160}
    Trainer(Config.of(**{**options, "out_dir": str(folder)}), quiet=True).fit()
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, in the working directory under the name `run`."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(finished, tmp_path / "run")).relative_to(tmp_path)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the evaluations of a run in `log`, and a `file` and a `folder`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "eval.jsonl").write_text(GOOD)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("precious")
    return tmp_path


def refused(
    capsys: pytest.CaptureFixture[str], tool: ModuleType, *argv: object, code: int = 2
) -> str:
    """What a tool says on stderr while it ends with this exit code and nothing on stdout."""
    with pytest.raises(SystemExit) as stop:
        tool.main([str(word) for word in argv])
    out, err = capsys.readouterr()
    assert stop.value.code == code and not out
    assert err.count("\n") == 1 and "Traceback" not in err
    return err


def forbid(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
    """From here on, calling this function is a failure: it stands for the work."""
    monkeypatch.setattr(module, name, lambda *args, **others: pytest.fail(f"{name} was called"))


# --- where tools write ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "words"),
    [
        pytest.param("folder", "--json folder: is a folder, not a file", id="attack 33"),
        pytest.param("", "--json must name a file", id="attack 33, empty"),
        pytest.param("file/a.json", "--json file/a.json: file is a file", id="attack 33, file"),
        pytest.param("n" * 300, "cannot be written (File name too long)", id="attack 33, long"),
    ],
)
def test_evaluate_refuses_a_path_before_it_loads_the_model(
    here: Path,
    path: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forbid(monkeypatch, evaluate, "load")
    assert words in refused(capsys, evaluate, "shipped", "--json", path)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        pytest.param(["--out", "folder"], "--out must end with .png, .svg, .pdf", id="attack 34"),
        pytest.param(["--out", "folder.png"], "folder.png: is a folder, not", id="attack 34, onto"),
        pytest.param(["--out", ""], "--out must name a file, got", id="attack 34, empty"),
        pytest.param(["--out", "file/c.png"], "file is a file, not a folder", id="attack 34, file"),
        pytest.param(
            ["--out", "c.png", "--metric", "nope"],
            "--metric nope: log has only exact",
            id="attack 34, metric",
        ),
        pytest.param(
            ["--out", "c.png", "--metric", "brier"],
            "--metric brier: log has no finite value of it; others have: exact",
            id="a metric of nulls",
        ),
        pytest.param(
            ["--out", "c.png", "--metric", "exat"],
            "--metric exat: log has only exact; did you mean exact?",
            id="attack 34, typo",
        ),
    ],
)
def test_curves_refuses_what_it_cannot_draw(
    here: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "folder.png").mkdir()
    assert words in refused(capsys, curves, "log", *argv)
    assert not (here / "c.png").exists()


def test_curves_makes_the_folder_of_its_figure(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """attack 34: `--out` into a missing folder."""
    pytest.importorskip("matplotlib")
    curves.main(["log", "--metric", "exact", "--out", "new/deep/c.svg"])
    assert (here / "new" / "deep" / "c.svg").read_text().startswith("<?xml")
    assert "wrote new/deep/c.svg" in capsys.readouterr().out


def test_curves_draws_only_shares_in_per_cent(here: Path) -> None:
    """A likelihood of -2.5 was drawn as -250 %."""
    pytest.importorskip("matplotlib")
    rows = ({"step": n, "solved_sampled": 0.25, "likelihood": -2.5 + n} for n in (0, 1))
    (here / "log" / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves.main(["log", "--metric", "likelihood", "--out", "c.svg"])
    drawn = (here / "c.svg").read_text()
    assert "<!-- likelihood -->" in drawn and "log: -2.500 → -1.500 -->" in drawn
    record = curves.read(Path("log"))[-1]
    assert all(curves.is_share(x, record) for x in ("solved", "solved_sampled", "pass@4"))


def test_curves_says_that_runs_drawn_as_one_line_differ_in_more_than_their_seeds(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """lr-1e-4 and lr-1e-5 look like two seeds of lr-1e."""
    monkeypatch.setattr(curves, "draw", lambda *args, **options: None)
    for name, old, new in (
        ("lr-1e-4", "seed = 0", "seed = 1"),
        ("lr-1e-5", "learning_rate = 0.01", "learning_rate = 0.02"),
    ):
        shutil.copytree(run, name)
        record = (Path(name) / "config.toml").read_text()
        assert old in record
        (Path(name) / "config.toml").write_text(record.replace(old, new))
    curves.main([str(run), "lr-1e-4", "lr-1e-5", "--pool", "--out", "c.svg"])
    said = " ".join(capsys.readouterr().err.split())
    assert "lr-1e: is drawn as one line, but its runs differ in --learning-rate" in said
    assert said.count("differ in") == 1 and "--seed" not in said


@pytest.mark.parametrize(
    ("out", "words"),
    [
        pytest.param("file", "--out file: file is a file, not a folder", id="attack 35, a file"),
        pytest.param("file/x", "--out file/x: file is a file", id="attack 35, under"),
        pytest.param("full", "model.safetensors in it is a folder", id="attack 35, a folder"),
        pytest.param("", "--out must name a folder, got ''", id="export, empty"),
        pytest.param("run", "--out run: holds a run", id="export RUN --out RUN"),
        pytest.param("run/../run", "holds a run", id="export RUN --out RUN by another name"),
        pytest.param("half", "--out half: holds a run", id="export onto a run without a config"),
        pytest.param("left", "overwrite (found: metrics.jsonl)", id="export onto what a run left"),
    ],
)
def test_export_refuses_a_folder_before_it_loads_the_model(
    run: Path,
    here: Path,
    out: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (here / "full" / "model.safetensors").mkdir(parents=True)
    (here / "half" / "checkpoints").mkdir(parents=True)
    (here / "left").mkdir()
    (here / "left" / "metrics.jsonl").write_text("{}")
    forbid(monkeypatch, export, "load_model")
    before = (run / "model.safetensors").read_bytes()
    assert words in refused(capsys, export, run, "--out", out)
    assert (run / "model.safetensors").read_bytes() == before
    assert (here / "file").read_text() == "precious"


def test_export_does_not_overwrite_the_model_that_it_exports(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export.main(["run", "--out", "model"])
    capsys.readouterr()
    words = "is the model to export; take another folder"
    Path("link").symlink_to("model")
    for name in ("model", "model/model.safetensors", "link", "link/model.safetensors"):
        for out in ("model", "link", "model/../link"):
            assert f"--out {out}: {words}" in refused(capsys, export, name, "--out", out)
    other = Path("model").rename("other") / "own.safetensors"
    (other.parent / "model.safetensors").rename(other)
    export.main([str(other), "--out", "other"])  # that replaces no file that it reads


def test_export_does_not_overwrite_the_model_that_the_run_began_with(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export.main([str(run), "--out", "base"])
    capsys.readouterr()
    record = run / "config.toml"
    for init_from in ("base", "base/model.safetensors"):
        text = record.read_text()
        record.write_text(text.replace('init_from = "scratch"', f'init_from = "{init_from}"'))
        err = refused(capsys, export, run, "--out", "../" + Path.cwd().name + "/base")
        assert "base: is the base of run; take another folder" in err
        record.write_text(text)


def test_export_finds_what_is_in_the_way_before_it_replaces_a_file(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export.main([str(run), "--out", "model"])
    capsys.readouterr()
    Path("model/tokenizer_config.json").mkdir()
    before = Path("model/model.safetensors").stat().st_mtime_ns
    err = refused(capsys, export, run, "--out", "model")
    assert "--out model: tokenizer_config.json in it is a folder, not a file" in err
    assert Path("model/model.safetensors").stat().st_mtime_ns == before


def test_export_refuses_a_folder_whose_other_files_would_be_read_with_its_own(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("chat_template.jinja", "model.safetensors.index.json"):
        Path("old").mkdir()
        (Path("old") / name).write_text("of another model")
        words = f"--out old: has {name} of another model, which this one does not have"
        assert words in refused(capsys, export, run, "--out", "old")
        assert [path.name for path in Path("old").iterdir()] == [name]
        shutil.rmtree("old")
    export.main([str(run), "--out", "old"])
    export.main([str(run), "--out", "old"])  # the same files are replaced


def test_export_does_not_overwrite_a_model_that_it_did_not_write(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as the base of adapters, without which the run is lost."""
    export.main(["run", "--out", "base"])
    config = Config.of(**{**TINY, "init_from": "./base", "max_steps": 1, "eval_every": 0})
    Trainer(config.replace(lora_rank=2, out_dir="run0"), quiet=True).fit()
    Path("run1").mkdir()
    text = Path("run0/config.toml").read_text()
    assert '"./base"' in text
    Path("run1/config.toml").write_text(text.replace('"./base"', '"run0"'))
    before = Path("base/model.safetensors").read_bytes()
    capsys.readouterr()
    for name in ("run0", "run1"):
        words = f"--out base: is the base of {name}; take another folder"
        assert words in refused(capsys, export, name, "--out", "./base")
    settings = json.loads(Path("base/config.json").read_text())
    assert settings.pop("written_by") == "minigrpo export"
    Path("base/config.json").write_text(json.dumps(settings))
    words = "which this command did not write; take another folder"
    assert f"base: has model.safetensors, {words}" in refused(
        capsys, export, "run", "--out", "base"
    )
    Path("own").mkdir()
    for name in ("tokenizer.json", "generation_config.json"):
        Path("own", name).write_text("precious")
        assert f"own: has {name}, {words}" in refused(capsys, export, "run", "--out", "own")
        Path("own", name).unlink()
    assert Path("base/model.safetensors").read_bytes() == before
    Path("shards").mkdir()
    Path("shards/model.safetensors.index.json").write_text("{}")
    words = "--out shards: holds model.safetensors.index.json; take another folder"
    assert words in refused(capsys, export, "run0", "--adapters", "--out", "shards")


def test_export_does_not_overwrite_adapters_that_it_did_not_write(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Config.of(**{**TINY, "max_steps": 1, "eval_every": 0, "lora_rank": 2})
    Trainer(config.replace(out_dir="lora"), quiet=True).fit()
    capsys.readouterr()
    Path("mine").mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        Path("mine", name).write_bytes(Path("lora", name).read_bytes())
        before = Path("mine", name).read_bytes()
        words = f"--out mine: has {name}, which this command did not write; take another folder"
        assert words in refused(capsys, export, "lora", "--adapters", "--out", "mine")
        assert Path("mine", name).read_bytes() == before
        Path("mine", name).unlink()
    for _ in range(2):  # its own are replaced
        export.main(["lora", "--adapters", "--out", "mine"])


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), "rust"])
def test_an_export_onto_a_full_disk_leaves_the_older_one_whole(
    run: Path, error: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """attack 35. safetensors raises an error of its own for a full disk."""
    export.main(["run", "--out", "model"])
    before = {path.name: path.read_bytes() for path in Path("model").iterdir()}
    capsys.readouterr()

    def full(tensors: object, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device") if error == "rust" else error

    monkeypatch.setattr(weight_files, "save_file", full)
    for out in ("model", "new/deep"):
        err = refused(capsys, export, "run", "--out", out)
        assert f"--out {out}: cannot be written (No space left on device" in err
    assert {path.name: path.read_bytes() for path in Path("model").iterdir()} == before
    assert not Path("new").exists()


def test_an_export_that_is_killed_leaves_no_mix_of_two_models(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export.main(["run", "--out", "model"])
    names = {path.name for path in Path("model").iterdir()}
    replace = os.replace
    for number in range(len(names)):
        calls = count()

        def killed(source: Path, target: Path, number: int = number, calls: Any = calls) -> None:
            if next(calls) == number:
                raise KeyboardInterrupt
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr("os.replace", killed)
            with pytest.raises(SystemExit):
                export.main(["run", "--out", "model"])
        assert "model.safetensors" not in {path.name for path in Path("model").iterdir()}
    export.main(["run", "--out", "model"])
    assert {path.name for path in Path("model").iterdir()} == names


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--out", "folder.jsonl"], "--out folder.jsonl: is a folder, not a file"),
        (["--out", "file/a.jsonl"], "--out file/a.jsonl: file is a file, not a folder"),
        (["--out", ""], "--out must name a file"),
        (["--out", "a.jsonl", "--workers", "100000"], "--workers must be at most 256, got 100000"),
    ],
    ids=lambda value: "",
)
def test_annotate_refuses_a_path_before_it_starts_an_engine(
    here: Path,
    argv: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (here / "folder.jsonl").mkdir()
    forbid(monkeypatch, annotate, "find_engine")
    assert words in refused(capsys, annotate, *argv)


@pytest.mark.parametrize(
    "name",
    [
        *("eval.jsonl", "model.safetensors", "checkpoints/step_000002/state.pt", "config.toml"),
        *("track_id", "job_summary.txt", "tensorboard/events", "profile/a/trace.json", ".lock"),
        *("tokenizer_config.json", "merges.txt"),
    ],
)
@pytest.mark.parametrize("is_there", [True, False])
def test_evaluate_does_not_write_onto_a_file_of_the_run(
    run: Path, name: str, is_there: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not where one will be, either: a run that continues would take it for its own."""
    file = run / name
    if is_there and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("precious")
    if not is_there:
        file = run / name.replace("config.toml", "summary.json")
        file.unlink(missing_ok=True)
    before = file.read_bytes() if is_there else b""
    said = refused(capsys, evaluate, run, "--n", "2", "--json", file)
    assert f"--json {file}: is " in said and ("of a run or a model" in said or not is_there)
    assert (file.read_bytes() == before) if is_there else not file.exists()


def test_a_link_to_a_file_of_a_run_is_not_written_through(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in ("metrics.jsonl", "checkpoints/step_000002/state.pt"):
        before, link = (run / target).read_bytes(), Path("found.json")
        link.symlink_to(run / target)
        words = "--json found.json: is a file of a run or a model"
        assert words in refused(capsys, evaluate, run, "--n", "2", "--json", link)
        assert (run / target).read_bytes() == before
        link.unlink()


def test_two_results_do_not_go_into_one_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The figure replaced the figures."""
    other, said = shutil.copytree(run, "other"), "--json and --plot name one file, "
    both = ("--json", "found.png", "--plot", run / "../found.png")
    assert said in refused(capsys, compare, run, other, *both)
    assert said in refused(capsys, evaluate, run, *both)
    assert not Path("found.png").exists()


def test_a_file_that_stdout_goes_to_keeps_what_it_has(tmp_path: Path) -> None:
    """`--json /dev/stdout >> log` replaced the log."""
    log = tmp_path / "log"
    log.write_text("precious\n")
    code = (
        "from pathlib import Path; from minigrpo.runtime.outputs import write_output; "
        "write_output('--json', Path('/dev/stdout'), lambda path: path.write_text('{}\\n'))"
    )
    with log.open("a") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert log.read_text() == "precious\n{}\n"


@pytest.mark.parametrize("flag", ["--data", "--rewards", "--chat-template"])
def test_evaluate_does_not_write_onto_a_file_that_it_reads(
    run: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = run.parent / "mine.jsonl"
    mine.write_text("mine")
    words = f"--json {mine}: is a file that this command reads; take another"
    assert words in refused(capsys, evaluate, run, flag, mine, "--json", mine)
    assert mine.read_text() == "mine"


def test_annotate_does_not_write_onto_the_positions_that_it_reads(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = here / "mine.jsonl"
    mine.write_text("mine")
    words = f"--out {mine}: is a file that this command reads; take another"
    assert words in refused(capsys, annotate, "--positions", mine, "--out", mine)
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (lambda text: "", "has no settings"),
        (lambda text: text[: text.index("[run]")], "is cut off, a run's record ends with"),
        (lambda text: text.replace("seed = 0", "seed = -1"), "--seed must be at least 0"),
    ],
)
def test_the_settings_of_a_damaged_record_are_not_guessed(
    run: Path, cut: Callable[[str], str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The defaults would be another task, tokenizer or seed."""
    record = run / "config.toml"
    record.write_text(cut(record.read_text()))
    for tool, argv in (
        (evaluate, [run, "--n", 2]),
        (sample, [run, "--prompt", "1+1="]),
        (sample, [run]),
        (export, [run, "--out", "new"]),
        (doctor, [run]),
        (train, ["--init-from", run, "--out-dir", "new"]),
        (plan, ["--init-from", run]),
    ):
        assert f"run/config.toml: {words}" in refused(capsys, tool, *argv)
    assert not Path("new").exists()


def test_a_run_that_lost_its_record_is_not_taken_for_a_model(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be evaluated on the default task."""
    (run / "config.toml").unlink()
    for tool, argv in (
        (evaluate, [run]),
        (export, [run, "--out", "new"]),
        (train, ["--init-from", run, "--out-dir", "new"]),
    ):
        assert "run: is a run without its config.toml" in refused(capsys, tool, *argv)
    doctor.main([str(run)])
    assert "run: has no config.toml, so its settings are taken to be" in capsys.readouterr().err
    words = ["--n", "1", "--max-new-tokens", "4"]
    evaluate.main([str(run / "model.safetensors"), *words])  # the weights alone


# --- what curves reads ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param("[]\n", "log/eval.jsonl, line 1: must be a JSON object", id="attack 34, list"),
        pytest.param(GOOD + "{]\n" + GOOD, "line 3: is not JSON", id="damaged in the middle"),
        pytest.param(GOOD + "[" * 100_000 + "\n", "line 3: is not JSON", id="deep"),
        pytest.param(GOOD + "7\n", "line 3: must be a JSON object", id="a number"),
        pytest.param("{}\n", "line 1: step must be a whole number, got None", id="no step"),
        pytest.param('{"step": "x"}\n', "line 1: step must be a whole number, got 'x'", id="step"),
        pytest.param('{"step": true}\n', "step must be a whole number, got True", id="bool"),
        pytest.param(
            f'{{"step": {"9" * 400}}}\n', "must be a whole number", id="a step of 400 digits"
        ),
        pytest.param('{"step": 1.5}\n', "line 1: step must be a whole number, got 1.5", id="half"),
        pytest.param('{"step": 1, "exact": "hi"}\n', "line 1: 'exact' must be a number", id="text"),
        pytest.param('{"step": 1, "exact": [1]}\n', "'exact' must be a number", id="nested"),
        pytest.param(
            '{"step": 1, "count/x": "7"}\n', "line 1: 'count/x' must be a number", id="kind"
        ),
        pytest.param("", "log/eval.jsonl: has no records", id="empty"),
        pytest.param("\n \n", "log/eval.jsonl: has no records", id="blank"),
        pytest.param('{"step": 1, "ex', "log/eval.jsonl: has no records", id="half a line"),
        pytest.param(b"{}\n\xff\xfe\n", "log/eval.jsonl, line 2: is not UTF-8", id="bytes"),
        pytest.param(None, "log/eval.jsonl: cannot be read (Is a directory)", id="a folder"),
    ],
)
def test_a_bad_eval_jsonl_is_one_line_that_names_its_line(
    here: Path, content: str | bytes | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = here / "log" / "eval.jsonl"
    file.unlink()
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    assert words in refused(capsys, curves, "log", "--kinds")


def test_a_pipe_in_place_of_a_log_is_not_waited_for(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "log" / "eval.jsonl").unlink()
    os.mkfifo(here / "log" / "eval.jsonl")
    assert "log/eval.jsonl: is not a file" in refused(capsys, curves, "log")


def test_a_mean_is_drawn_only_where_all_of_its_runs_have_a_value(here: Path) -> None:
    """Where a run ended early, the line would jump to the mean of the others."""
    whole = [{"step": step, "exact": step / 10} for step in (0, 5, 9)]
    short = [{"step": step, "exact": 1.0} for step in (0, 5)]
    assert curves.points([whole, short], "exact") == {0: [0.0, 100.0], 5: [50.0, 100.0]}
    said: list[str] = []
    lines = {"grpo": [whole, short], "rloo": [whole]}
    curves.check_common_steps(lines, "exact", said.append)
    assert said == ["grpo: its 2 runs have 2 of 3 evaluated steps in common; only these are drawn"]
    with pytest.raises(ConfigError, match="--pool: the runs of grpo have no evaluated step in com"):
        curves.check_common_steps({"grpo": [whole[:1], short[1:]]}, "exact", pytest.fail)


def test_a_line_that_is_still_being_written_is_left_out(here: Path) -> None:
    file = here / "log" / "eval.jsonl"
    file.write_text(f'{GOOD}{{"step": 12, "exa')
    assert [record["step"] for record in read_records(file)] == [0, 9]


def test_null_and_nan_are_missing_values(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ['{"step": 14, "exact": null}', '{"step": 16, "exact": NaN}', '{"step": 18}']
    (here / "log" / "eval.jsonl").write_text(GOOD + "\n".join(lines) + "\n")
    records = curves.read(Path("log"))
    assert curves.points([records], "exact") == {0: [25.0], 9: [50.0]}
    curves.main(["log", "--kinds"])
    cells = capsys.readouterr().out.splitlines()[4].split()  # the last evaluation has no value
    assert cells == ["log", "18", "-", "-", "-", "25.0%", "-", "-", "-"]


def test_evaluations_of_other_numbers_of_examples_are_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = {"exact_sampled": 0.5, "exact": 0.5, "exact/a": 0.5}
    lines = [
        json.dumps({"step": step, "n": n, "count/a": n, **shares}) for step, n in ((0, 8), (9, 40))
    ]
    (here / "log" / "eval.jsonl").write_text("\n".join(lines) + "\n")
    curves.main(["log", "--kinds"])
    out = capsys.readouterr().out
    assert f"log: 8 held-out examples before, 40 after{OTHER_EXAMPLES}" in " ".join(out.split())
    assert out.count("8 before, 40 after") == 1
    (here / "log" / "eval.jsonl").write_text(f"{lines[1]}\n")
    curves.main(["log", "--kinds"])
    assert "before, 40 after" not in capsys.readouterr().out


def test_lines_of_two_runs_in_one_file_are_put_in_order_and_said(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = here / "log" / "eval.jsonl"
    lines = [json.dumps({"step": step, "n": 8, "exact": step / 10}) for step in (4, 0, 9, 2)]
    file.write_text("\n".join(lines) + "\n")
    curves.main(["log"])
    out, err = capsys.readouterr()
    assert "0.0%" in out and "90.0%" in out and "its steps are not in order" in err
    file.write_text("\n".join([*lines, json.dumps({"step": 4, "n": 8, "exact": 1.0})]) + "\n")
    records = curves.read(Path("log"))
    assert curves.points([records], "exact") == {0: [0.0], 2: [20.0], 4: [100.0], 9: [90.0]}
    (here / "log" / "metrics.jsonl").write_text('{"step": 2}\n{"step": 1}\n{"step": 2}\n')
    doctor.main(["log"])
    out, err = capsys.readouterr()
    assert "in 2 steps" in out
    for name in ("metrics", "eval"):
        assert f"log/{name}.jsonl: 1 lines repeat the step of an earlier one" in err


@pytest.mark.parametrize("content", ["", "{", "[]", '{"wall_seconds": "x"}', "[" * 100_000])
def test_a_damaged_summary_costs_its_seconds_and_no_more(
    here: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """attack 34: a disk that was full leaves a summary.json of 0 bytes."""
    (here / "log" / "summary.json").write_text(content)
    curves.main(["log"])
    out, err = capsys.readouterr()
    assert "+25.0" in out and "Traceback" not in err
    assert ("log/summary.json" in err) == ("wall" not in content)


def test_brackets_in_a_name_are_no_markup(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """attack 22, and kinds of questions with the same names."""
    for name in ("r[bold]", "x[red]"):
        shutil.copytree("log", name)
        line = {"step": 0, "exact": 1, "exact/[/b]": 0.5, "count/[/b]": 4, "count/[red]x": 2}
        Path(name, "eval.jsonl").write_text(json.dumps(line) + "\n")
    curves.main(["r[bold]", "x[red]", "--kinds"])
    out = capsys.readouterr().out
    assert "r[bold]" in out and "x[red]" in out and "│ [/b]" in out and "│ [red]x" in out


def test_two_folders_of_one_name_are_two_lines(here: Path) -> None:
    """Drawn under one name, the second would replace the first."""
    runs = [Path("log"), Path("x/log"), Path("other")]
    assert curve_tables.names_of(runs) == {
        Path("log"): "log",
        Path("x/log"): "x/log",
        Path("other"): "other",
    }
    assert curve_tables.names_of([Path()]) == {Path(): here.name}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        pytest.param(["--kinds"], "needs the folder of at least one run", id="attack 47"),
        pytest.param([], "minigrpo curves needs the folder of at least one run", id="nothing"),
        pytest.param(["nowhere"], "nowhere: no such folder", id="missing"),
        pytest.param(["file"], "file: no such folder", id="a file"),
        pytest.param(["folder"], "folder: no eval.jsonl in this folder", id="no run"),
        pytest.param(["log", "folder"], "folder: no eval.jsonl in this folder", id="one of two"),
    ],
)
def test_curves_of_what_is_no_run(
    here: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, curves, *argv)


# --- which model ----------------------------------------------------------------------------------

TOOLS: dict[str, tuple[ModuleType, list[str]]] = {
    "sample": (sample, ["--examples", "1"]),
    "evaluate": (evaluate, ["--n", "2"]),
    "export": (export, ["--out", "out"]),
}


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "nowhere: there is no such file"),
        ("folder", "folder: neither a run (no config.toml) nor a model (no model.safetensors)"),
        ("file", "file: not a whole safetensors file"),
        ("log", "log: neither a run (no config.toml) nor a model"),
        ("log/eval.jsonl", "log/eval.jsonl: not a whole safetensors file"),
    ],
    ids=lambda value: "",
)
def test_what_is_no_model_is_one_line(
    here: Path, tool: str, name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module, more = TOOLS[tool]
    assert words in refused(capsys, module, name, *more)
    assert not (here / "out").exists()


def without_config(run: Path) -> str:
    (run / "config.toml").write_bytes(b"\xff\xfe")
    return "error: run/config.toml: cannot be read"


def config_with_unknown_key(run: Path) -> str:
    (run / "config.toml").write_text("[run]\nteleport = 3\n")
    return "error: run/config.toml: unknown key 'teleport'"


def only_config(run: Path) -> str:
    """As a run leaves it that was killed before its first checkpoint."""
    shutil.rmtree(run / "checkpoints")
    (run / "model.safetensors").unlink()
    return "run: a run without a whole checkpoint, and without model.safetensors"


def damaged_weights(run: Path) -> str:
    shutil.rmtree(run / "checkpoints")
    os.truncate(run / "model.safetensors", 100)
    return "model.safetensors: not a whole safetensors file"


DAMAGE: list[Callable[[Path], str]] = [
    without_config,
    config_with_unknown_key,
    only_config,
    damaged_weights,
]


@pytest.mark.parametrize("tool", ["sample", "evaluate"])
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_run_is_one_line(
    run: Path, tool: str, damage: Callable[[Path], str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = damage(run)
    module, more = TOOLS[tool]
    assert words in refused(capsys, module, run, *more)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": {"vocab_size": 360, "rings": 9}},
        {"shape": None},
        {"shape": {"vocab_size": -1}},
        {"model": {}},
        {"model": 7},
    ],
    ids=repr,
)
def test_a_checkpoint_of_another_version_is_named_and_an_older_one_used(
    run: Path, change: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    state = load_checkpoint(path_of(run / "checkpoints", 2))
    save_checkpoint(run / "checkpoints", 3, {**state, "step": 3, **change}, keep_last=9)
    sample.main([str(run), "--examples", "1"])
    out, err = capsys.readouterr()
    assert f"{path_of(run / 'checkpoints', 2)}, greedy" in out
    words = "is not a checkpoint of this version" if change != {"model": 7} else "its model is 7"
    assert "step_000003" in err and words in err and err.count("\n") == 1


@pytest.mark.parametrize("tool", TOOLS)
def test_a_folder_of_another_user_is_one_line(
    run: Path, tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything in a folder without permissions is a PermissionError, even the question whether a
    file is there. Tests may run as root, who has all permissions.
    """
    stat = Path.stat

    def forbidden(path: Path, **options: bool) -> os.stat_result:
        if path.parent == run:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", forbidden)
    module, more = TOOLS[tool]
    assert "error: run/config.toml: Permission denied" in refused(capsys, module, run, *more)


def test_an_error_of_the_system_that_is_no_file_keeps_its_traceback() -> None:
    with pytest.raises(OSError, match="^no such thing"), one_line_errors():
        raise OSError("no such thing")


@pytest.mark.parametrize("words", [["--pool"], ["--difference"], ["--metric", "exact"]])
def test_flags_of_the_figure_need_a_figure(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "go with --out" in refused(capsys, curves, "a-run", *words)


# --- flags and Ctrl-C -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "argv", "words"),
    [
        (evaluate, ["shipped", "--n", "0"], "--n must be at least 1, got 0"),
        (evaluate, ["shipped", "--n", "-5"], "--n must be at least 1, got -5"),
        (sample, ["shipped", "--n", "-1"], "--n must be at least 0"),
        (sample, ["shipped", "--examples", "0"], "--examples at least 1"),
        (sample, ["shipped", "--temperature", "0.5"], "--temperature goes with --n"),
        (sample, ["shipped", "--min-p", "0.5"], "--min-p goes with --n"),
        (sample, ["shipped", "--move", "e2e4"], "--fen and --move go together"),
    ],
    ids=lambda value: "",
)
def test_flags_are_checked_before_the_model_is_loaded(
    tool: ModuleType,
    argv: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forbid(monkeypatch, tool, "load")
    assert words in refused(capsys, tool, *argv)


@pytest.mark.parametrize("tool", ["sample", "evaluate", "export"])
def test_ctrl_c_is_one_line_and_leaves_nothing(
    here: Path, tool: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load_model", interrupted)
    monkeypatch.setattr(export, "load_model", interrupted)
    module, more = TOOLS[tool]
    before = sorted(here.rglob("*"))
    more = [*more, "--json", "a.json"] if tool == "evaluate" else more
    assert refused(capsys, module, "shipped", *more, code=130).startswith("stopped")
    assert sorted(here.rglob("*")) == before


def test_ctrl_c_in_the_middle_of_an_evaluation_ends_its_threads_too(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    closed = list[bool]()
    close = RewardScorer.close
    monkeypatch.setattr(evaluate, "grade", interrupted)
    monkeypatch.setattr(RewardScorer, "close", lambda self: closed.append(True) or close(self))
    with pytest.raises(SystemExit) as stop:
        evaluate.main(["shipped", "--n", "2", "--json", "a.json"])
    assert stop.value.code == 130 and "stopped; nothing was written" in capsys.readouterr().err
    assert closed == [True] and not (here / "a.json").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config", "folder"], "--config folder: is a folder, not a file"),
        (["--config", "nowhere.toml"], "--config nowhere.toml: cannot be read"),
        (["--config", ""], "--config must name a TOML file or a preset, got ''"),
        (["--init-from", "folder"], "--init-from"),
        (["--tokenizer", "folder"], "--tokenizer folder"),
        (["--task", "nowhere.py"], "--task nowhere.py"),
    ],
    ids=lambda value: "",
)
def test_a_plan_of_what_is_not_there_is_one_line(
    here: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, plan, *argv)
