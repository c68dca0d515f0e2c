"""The page of `minigrpo report` in a real browser: MUST_RUN=browser pytest -m browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minigrpo.runtime.text import parse_json
from minigrpo.tools import report

from .browser import Browser, browser
from .test_report import HOSTILE, TRUE, WRONG, completion, lines, write_run

pytestmark = pytest.mark.browser
OUTSIDE = "http", "ws", "ftp"  # what addresses of requests must not begin with


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pages of one run, of two, and of one that has hardly begun."""
    folder = tmp_path_factory.mktemp("pages")
    shared = TRUE[:10] + "x"  # begins like the truth
    one = write_run(folder / "<b>one", texts=(TRUE, WRONG, shared, TRUE, HOSTILE))
    two = write_run(folder / "two", steps=60)
    bare = folder / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text(
        lines([{"step": 1, "rewards/</script><i>/mean": 0.5, "loss": None}])
    )
    for name, runs in {"one": [one], "both": [one, two], "bare": [bare]}.items():
        report.main([*map(str, runs), "--out", str(folder / f"{name}.html")])
    return folder


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def show(window: Browser, page: Path, width: int = 1200) -> None:
    window.resize(width, 900)
    window.console(), window.requests()  # those of the page before
    window.open(page.as_uri())
    window.wait("document.body.dataset.ready")


def text(window: Browser, selector: str) -> str:
    """What a reader sees of an element; half of a surrogate pair cannot be sent."""
    script = "return document.querySelector(arguments[0]).innerText.toWellFormed()"
    return str(window.run(script, selector))


@pytest.mark.parametrize("name", ["one", "both", "bare"])
@pytest.mark.parametrize("width", [390, 1024, 1600])
def test_it_asks_for_nothing_writes_no_error_and_fits(
    folder: Path, window: Browser, name: str, width: int
) -> None:
    show(window, folder / f"{name}.html", width)
    assert window.console() == []
    asked = window.requests()
    assert asked and not [address for address in asked if address.startswith(OUTSIDE)]
    assert window.run("return document.documentElement.scrollWidth") <= width
    cut = """return [...document.querySelectorAll("h1,h2,h3,p,button,select,td,.bk-Figure")]
        .filter((x) => x.offsetParent && !x.closest(".scroll, .tree"))
        .filter((x) => x.getBoundingClientRect().right > innerWidth + 1)
        .map((x) => x.outerHTML.slice(0, 80))"""
    assert window.run(cut) == []


def test_hostile_texts_are_texts(folder: Path, window: Browser) -> None:
    show(window, folder / "one.html")
    assert window.run("return document.title").startswith("<b>one")
    assert window.run("return document.querySelectorAll('main img, main script').length") == 0
    press(window, "#train", "Completions")
    assert "onerror=alert(1)" in text(window, "#train")


def press(window: Browser, place: str, words: str) -> None:
    found = window.run(
        """const all = [...document.querySelectorAll(arguments[0] + " button")];
        const button = all.find((x) => x.textContent === arguments[1]);
        if (button) button.click();
        return Boolean(button)""",
        place,
        words,
    )
    assert found, f"no button {words} in {place}"


def test_the_hover_reads_the_values_of_all_lines(folder: Path, window: Browser) -> None:
    show(window, folder / "both.html")
    title = "Reward in training"
    place: Any = window.run(
        """const card = [...document.querySelectorAll(".card")].find(
            (x) => x.querySelector("h3").textContent === arguments[0]);
        card.scrollIntoView({ block: "center" });
        const box = card.querySelector(".plot").getBoundingClientRect();
        return [box.left, box.top, box.width, box.height]""",
        title,
    )
    left, top, width, height = place
    window.move_to(left + width / 2, top + height / 2)
    window.move_to(left + width / 2 + 3, top + height / 2)
    shown = """[...document.querySelectorAll(".bk-Tooltip")].map(
        (x) => x.shadowRoot.querySelector(".bk-tooltip-content")?.textContent).join()"""
    window.wait(f"({shown}).includes('step')")
    said = window.run(f"return {shown}")
    assert "<b>one" in said and "two" in said and len(re.findall(r"0\.\d", said)) == 2


def test_the_slider_averages_the_lines(folder: Path, window: Browser) -> None:
    show(window, folder / "one.html")
    read = """const found = [];
        for (const root of Bokeh.documents.flatMap((x) => x.roots()))
            for (const { data_source: x } of root.renderers)
                if (x.tags.includes("smooth")) found.push([x.data.logged0[19], x.data.drawn0[19]]);
        return found"""
    choose = """const slider = document.getElementById("smooth");
        slider.value = arguments[0];
        slider.oninput();
        return slider.parentElement.innerText"""
    assert "1 step" in window.run(choose, 0)
    assert all(logged == drawn for logged, drawn in window.run(read))
    assert "20 steps" in window.run(choose, 4)
    reward = next(x for x in window.run(read) if abs(x[0] - 0.5) < 1e-6)
    assert reward[1] == pytest.approx(sum(range(1, 21)) / 20 / 40)
    window.run("sessionStorage.clear()")


def test_the_prefix_tree_counts_distinct_tokens(folder: Path, window: Browser) -> None:
    show(window, folder / "one.html")
    press(window, "#train", "Prefix tree")
    said = text(window, "#train")
    distinct = len(
        {x[:k] for x in (TRUE, WRONG, TRUE[:10] + "x", HOSTILE) for k in range(1, len(x) + 1)}
    )
    all_tokens = 3 * len(TRUE) + 11 + len(HOSTILE)
    assert f"5 completions of {all_tokens} tokens, of which {distinct} are distinct" in said
    assert f"{12 + distinct} instead of {5 * 12 + all_tokens} tokens" in said
    counts = window.run(
        "return [...document.querySelectorAll('#train .count')].map((x) => x.innerText)"
    )
    assert counts[0] == "×4" and counts.count("×1") >= 2


def test_filters_and_buttons_choose_samples(folder: Path, window: Browser) -> None:
    show(window, folder / "one.html")
    assert "step 40" in text(window, "#train .at")
    press(window, "#train", "‹")
    assert "step 30" in text(window, "#train .at")
    choose = """const [place, label, value] = arguments;
        const select = document.querySelector(`${place} select[aria-label=${label}]`);
        select.value = value;
        select.onchange()"""
    window.run(choose, "#train", "kind", "capture")  # steps 20 and 40
    press(window, "#train", "‹")
    assert "step 20" in text(window, "#train .at")
    assert "prompt 1 of 3" in text(window, "#held-out .at")
    window.run(choose, "#held-out", "course", "became right")
    assert "prompt 1 of 2" in text(window, "#held-out .at")
    window.run(choose, "#held-out", "kind", "quiet")
    assert "prompt 1 of 1" in text(window, "#held-out .at")
    window.run(choose, "#held-out", "course", "became wrong")
    assert "None is left by the filter." in text(window, "#held-out")
    window.run("sessionStorage.clear()")


def test_wrong_squares_are_framed_on_both_boards(folder: Path, window: Browser) -> None:
    show(window, folder / "one.html")
    press(window, "#train", "Completions")
    press(window, "#train", "Show boards")
    frames = """return [...document.querySelectorAll("#train .boards svg")].map(
        (x) => [x.querySelectorAll("use").length, x.querySelectorAll("rect[stroke]").length])"""
    true, written = window.run(frames)
    assert true[0] == 3 and true[1] == written[1] > 0
    window.run("sessionStorage.clear()")


def test_the_theme_follows_the_system_and_the_button(folder: Path, window: Browser) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    for theme, expected in (("dark", "rgb(20, 22, 26)"), ("light", "rgb(255, 255, 255)")):
        features = [{"name": "prefers-color-scheme", "value": theme}]
        window.devtools("Emulation.setEmulatedMedia", features=features)
        show(window, folder / "one.html")
        assert window.run(background) == expected
    window.run("document.getElementById('theme').click()")
    assert window.run(background) == "rgb(20, 22, 26)"
    window.run("sessionStorage.clear()")


def test_runs_are_chosen_by_name(folder: Path, window: Browser) -> None:
    show(window, folder / "both.html")
    choose = """const select = document.querySelector("#pick-run select");
        select.value = "1";
        select.onchange();
        return select.selectedOptions[0].text"""
    assert window.run(choose) == "two"
    assert "step 60" in text(window, "#train .at")


def test_a_run_of_1300_steps_is_a_page_below_5_mb(tmp_path: Path, window: Browser) -> None:
    texts = tuple(chr(97 + g) * 300 for g in range(16))
    run = write_run(tmp_path / "long", steps=1300, texts=texts)
    others = {f"rewards/part{i}/mean": i / 30 for i in range(30)}
    logged = [parse_json(line) | others for line in (run / "metrics.jsonl").open()]
    (run / "metrics.jsonl").write_text(lines(logged))
    report.main([str(run), "--out", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").stat().st_size < 5e6
    show(window, tmp_path / "page.html")
    assert window.console() == []
    assert "of 130 that were logged are on this page" in text(window, "#train")


def test_a_page_of_another_format_of_samples_opens(tmp_path: Path, window: Browser) -> None:
    run = write_run(tmp_path / "old")
    old = completion(10, 0, "text", advantage=None, token_ids=None, tokens=None)
    (run / "samples.jsonl").write_text(json.dumps(old) + "\n")
    report.main([str(run), "--out", str(tmp_path / "page.html")])
    show(window, tmp_path / "page.html")
    assert window.console() == []
    assert "reward 0" in text(window, "#train") and "has logged none" in text(window, "#held-out")
