"""What a run shows on a terminal while it goes and at its end, and the doctor while it goes."""

import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from minigrpo import Config
from minigrpo.runtime.announce import progress, show_change
from minigrpo.runtime.logging import Screen
from minigrpo.runtime.measures import OTHER_EXAMPLES
from minigrpo.tools.cli import COMMANDS, usage
from minigrpo.tools.ending import BLANK, chart, show_ending
from minigrpo.tools.live import EVERY, URGENT, LiveDoctor

from .test_doctor import HEALTHY, ONLY, STEPS, Metrics


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def as_terminal(patch: pytest.MonkeyPatch, kind: str, columns: int) -> Terminal:
    """Put a terminal in the place of stdout. (Not in a fixture: pytest would replace it again.)"""
    out = Terminal()
    patch.setattr(sys, "stdout", out)
    patch.setenv("TERM", kind)
    patch.setenv("COLUMNS", str(columns))
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        patch.delenv(name, raising=False)
    return out


def run_of(folder: Path, metrics: Metrics, steps: int = STEPS) -> Path:
    records = [
        {"step": i + 1, **{name: float(values[i]) for name, values in metrics.items()}}
        for i in range(steps)
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


# --- the screen -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "columns", "live"), [("xterm", 80, True), ("xterm", 40, False), ("dumb", 80, False)]
)
def test_a_narrow_or_dumb_terminal_has_plain_lines_instead_of_a_bar(
    kind: str, columns: int, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = as_terminal(monkeypatch, kind, columns)
    screen = Screen()
    screen.start(total=2, done=0)
    for step in (1, 2):
        screen.update(step, 2, f"reward 0.{step}")
    screen.stop()
    out = terminal.getvalue()
    assert screen.live is live
    assert ("\x1b[" in out) is live
    assert ("step 2/2  reward 0.2  left 0:00\n" in out) is not live


@pytest.mark.parametrize("width", [40, 80])
def test_a_table_that_does_not_fit_is_printed_as_lines(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = as_terminal(monkeypatch, "xterm", width)
    columns, row = ["", "before", "after"], ["[/b]", "0.1234 [0.0456, 0.2345]", ""]
    Screen().table("all", columns, [row])
    out = re.sub(r"\x1b\[\d*m", "", terminal.getvalue())
    as_line = "  [/b] before 0.1234 [0.0456, 0.2345]\n"
    assert (as_line in out) is (width == 40)
    assert max(map(len, out.splitlines())) <= width


def test_paragraphs_break_between_words_and_lines_to_copy_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = as_terminal(monkeypatch, "dumb", 80)
    text = "longer " * 30
    Screen().say(text, wrap=True)
    lines = terminal.getvalue().rstrip().split("\n")
    assert len(lines) > 1 and all(line.rstrip().endswith("longer") for line in lines)
    Screen().say(text)
    assert text in terminal.getvalue()


def test_beside_the_bar_are_the_reward_the_measure_and_the_speed() -> None:
    metrics = {"reward": 0.5, "loss": 0.1, "completions/mean_length": 10.0, "step_time": 2.0}
    config = Config.of(prompts_per_step=16, group_size=16)
    last = {"step": 5, "solved_sampled": 0.25, "solved": 0.5}
    assert progress(metrics, last, config) == "reward 0.500  solved 25.0%  1,280 tok/s"
    del metrics["reward"]
    supervised = config.replace(loss="nll")
    assert progress(metrics, None, supervised) == "loss 0.100  80 tok/s"


@pytest.mark.parametrize(
    ("first", "n", "words"),
    [
        (0, 40, "40 held-out examples before and after 4 steps"),
        (2, 40, "40 held-out examples after 2 and after 4 steps"),
        (0, 8, "8 held-out examples before, 40 after 4 steps"),
        (2, 8, "8 held-out examples after 2, 40 after 4 steps"),
        (0, None, "? held-out examples before, 40 after 4 steps"),
    ],
)
def test_the_numbers_of_examples_before_and_after_are_named_where_they_differ(
    first: int, n: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a resume with another --eval-size, the last number was said to be that of both."""
    tables = list[tuple[str, list[list[str]]]]()
    monkeypatch.setattr(
        Screen, "table", lambda _, title, __, rows, **___: tables.append((title, rows))
    )
    shares = {"exact_sampled": 0.5, "exact": 0.5, "exact/a": 0.5}
    before, after = (
        {"step": s, "n": x, "count/a": x or 0, **shares} for s, x in ((first, n), (4, 40))
    )
    show_change(Screen(), before, after, {}, 9.0)
    differ = n != 40
    assert tables[0][0] == f"{words} (9 s), with 95 % intervals{OTHER_EXAMPLES * differ}"
    assert tables[1][1][0][:2] == ["a", f"{n or '?'} before, 40 after" if differ else "40"]


# --- the end --------------------------------------------------------------------------------------


def test_a_chart_draws_each_column_of_dots() -> None:
    # the first column has its lowest dot, the second all four: it comes from below
    assert chart(np.array([0.0, 1.0]), width=1, height=1) == ["0 " + chr(BLANK | 0x40 | 0xB8)]
    assert chart(np.array([3.0, 3.0]), width=2, height=2)[0].startswith("3 ")


def test_a_chart_rises_with_its_values_whatever_their_number() -> None:
    blank = chr(BLANK)
    for n in (2, 7, 1000):
        lines = chart(np.linspace(-1, 2, n), width=20, height=5)
        assert len(lines) == 5 and len({len(line) for line in lines}) == 1
        labels, curves = zip(*((line[:-20], line[-20:]) for line in lines), strict=True)
        assert -1 <= float(labels[-1]) < -0.9 and 1.9 < float(labels[0]) <= 2
        assert curves[0][0] == blank != curves[0][-1] and curves[-1][-1] == blank != curves[-1][0]


def test_a_chart_leaves_out_what_is_no_number_and_needs_two() -> None:
    assert chart(np.array([np.nan, 1.0, np.inf]), width=9) == []
    values = np.array([1.0, np.nan, 2.0])
    assert chart(values, width=9) == chart(values[[0, 2]], width=9)


@pytest.mark.parametrize(("kind", "drawn"), [("xterm", True), ("dumb", False)])
def test_a_run_ends_with_its_curve_the_doctor_and_what_to_type(
    tmp_path: Path, kind: str, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = as_terminal(monkeypatch, kind, 80)
    show_ending(Screen(), run_of(tmp_path, HEALTHY), Path("runs/a"))
    out = terminal.getvalue()
    assert ("reward by step" in out) is drawn and (chr(BLANK) in out) is drawn
    assert max(map(len, out.splitlines())) <= 80
    assert "doctor: " in out and out.index("doctor: ") < out.index("next:")
    assert "  minigrpo compare runs/a OTHER_RUN\n" in out


def test_a_run_without_metrics_ends_without_a_diagnosis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_ending(Screen(), tmp_path, tmp_path)
    out, err = capsys.readouterr()
    assert "no diagnosis: " in err and not out


def test_the_usage_lists_every_command_in_lines_of_a_terminal() -> None:
    lines = usage().splitlines()
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)
    assert max(map(len, lines)) <= 80


# --- the doctor while the run goes ----------------------------------------------------------------


def live(folder: Path, metrics: Metrics, first: int = 0) -> list[str]:
    """What the doctor says from step `first + 1` on, of a run with records before it."""
    said: list[str] = []
    doctor = LiveDoctor(run_of(folder, metrics, first + 1), said.append)
    for step in range(first + 1, STEPS + 1):
        doctor.step(step, {name: float(x[step - 1]) for name, x in metrics.items()})
    doctor.close()
    return said


def test_a_healthy_run_is_not_interrupted(tmp_path: Path) -> None:
    assert live(tmp_path, HEALTHY) == []


@pytest.mark.parametrize("first", [0, 50])
def test_what_is_urgent_is_said_once_and_before_the_end(tmp_path: Path, first: int) -> None:
    for rule in ("entropy collapses", "entropy explodes", "KL runs away"):
        said = live(tmp_path, {**HEALTHY, **ONLY[rule]["metrics"]}, first)
        assert len(said) == 1
        step = int(said[0].removeprefix("step ").split(":")[0])
        assert step % EVERY == 0 and first < step <= STEPS
        assert "nats per token" in said[0]


def test_a_fall_between_evaluations_is_urgent_and_length_is_not(tmp_path: Path) -> None:
    assert "falls" in URGENT and "length collapses" not in URGENT
    said: list[str] = []
    doctor = LiveDoctor(run_of(tmp_path, HEALTHY, 1), said.append)
    doctor.step(1, {})
    for step, share in ((0, 0.3), (10, 0.5), (20, 0.3)):
        doctor.evaluation(step, {"n": 1000.0, "exact_sampled": share})
    for step in range(2, 2 * EVERY + 1):
        doctor.step(step, {name: float(x[step]) for name, x in HEALTHY.items()})
    (line,) = said
    assert line.startswith(f"step {EVERY}: The model got better and then worse")


def test_without_records_the_doctor_waits(tmp_path: Path) -> None:
    doctor = LiveDoctor(tmp_path, pytest.fail)
    for step in range(1, EVERY + 1):
        doctor.step(step, {"entropy": 1.0})
