"""Put the page together: one HTML file that asks for nothing from anywhere."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...runtime.answers import ANSWERS
from ...runtime.flags import ConfigError
from ...runtime.measures import answer_in_words
from ..curve_tables import names_of
from ..diagnosis import NOTES, RULES, diagnose, not_judged
from ..records import is_number, read_lines
from ..run_data import RunData
from . import facts
from .charts import COLORS, Answers, charts
from .samples import ROOM, pieces_svg, samples

HERE = Path(__file__).parent
SMOOTHING = (1, 2, 5, 10, 20, 50, 100, 200)  # steps to average over


@dataclass(frozen=True)
class Source:
    """A run, where it is, and what was odd when it was read."""

    folder: Path
    run: RunData
    notices: list[str] = field(default_factory=list)


def render(sources: Sequence[Source], reload_seconds: int = 0) -> str:
    """The page as HTML. With `reload_seconds` a browser loads it again at that interval."""
    from bokeh.resources import Resources
    from jinja2 import Environment, FileSystemLoader

    names = names_of([source.folder for source in sources])
    runs = [_named(source.run, names[source.folder]) for source in sources]
    logged = [_samples(source, len(sources)) for source in sources]
    stated = [
        evaluated(source) or of_training(one) for source, one in zip(sources, logged, strict=True)
    ]
    groups = charts(runs, stated)
    cards = [card for found in groups.values() for card in found]
    script, places = _embedded([card.figure for card in cards])
    divs = dict(zip((id(card) for card in cards), places, strict=True))
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    boards = any("board" in one for found in logged for one in found["train"] + found["held_out"])
    steps = max(len(run.metrics) for run in runs)
    html = environment.get_template("page.html.j2").render(
        runs=[
            {
                "name": run.name,
                "color": COLORS[i % len(COLORS)],
                "result": facts.result(run),
                "status": facts.status(run),
                "job": facts.job(run),
                "findings": diagnose(run),
                "notes": diagnose(run, NOTES),
                "not_judged": not_judged(run),
                "command": facts.command(run),
                "environment": facts.environment(source.folder),
                "notices": source.notices,
            }
            for i, (run, source) in enumerate(zip(runs, sources, strict=True))
        ],
        num_rules=len(RULES),
        groups={
            title: [(card, divs[id(card)]) for card in found] for title, found in groups.items()
        },
        changed=facts.changed(runs),
        smoothing=SMOOTHING,
        smooth=int(np.searchsorted(SMOOTHING, max(1, steps // 40), side="right")) - 1,
        bokeh=Resources(mode="inline", components=["bokeh"], log_level="warn").render_js()
        if cards
        else "",
        script=script,
        pieces=pieces_svg() if boards else "",
        samples=in_script([{"name": run.name, **x} for run, x in zip(runs, logged, strict=True)]),
        reload_seconds=reload_seconds,
        css=(HERE / "page.css").read_text(encoding="utf-8"),
        js=(HERE / "page.js").read_text(encoding="utf-8"),
    )
    # half of a surrogate pair, which JSON can spell, has no bytes
    return html.encode("utf-8", "replace").decode("utf-8")


def _embedded(figures: Sequence[Any]) -> tuple[str, Sequence[str]]:
    """The script that draws the figures, and the element of each."""
    from bokeh.document import Document
    from bokeh.embed import components

    if not figures:
        return "", ()
    document = Document()
    with document.models.freeze():  # or each figure that is added would look at all of them
        for figure in figures:
            document.add_root(figure)
    script, places = components(figures)
    return script, places


def _named(run: RunData, name: str) -> RunData:
    return replace(run, name=name)


def _samples(source: Source, num_runs: int) -> dict[str, Any]:
    found = samples(source.folder, source.notices.append, ROOM // num_runs)
    return {"answer": answer_in_words(source.run.success), **found}


def evaluated(source: Source) -> Answers | None:
    """The answers of the last evaluation that state a confidence.

    Sampled ones, or the greedy ones where there are means of several samples.
    """
    file = source.folder / ANSWERS
    if not file.exists():
        return None
    try:
        records = read_lines(file)
    except ConfigError as error:
        source.notices.append(str(error))
        return None
    parts = dict[str, list[dict[str, Any]]]()
    for how in ("sampled", "greedy"):
        parts[how] = [x[how] for x in records if isinstance(x.get(how), dict)]
    how = "sampled" if all(x.get("correct", 0) in (0, 1) for x in parts["sampled"]) else "greedy"
    return _stated(parts[how], f"held out at step {records[-1].get('step')}, {how}")


def of_training(logged: dict[str, Any]) -> Answers | None:
    """The logged training completions of the last fifth of the steps that state a confidence."""
    groups = [group for group in logged["train"] if group["completions"]]
    late = [group for group in groups if group["step"] > 0.8 * groups[-1]["step"]]
    parts = [one["parts"] for group in late for one in group["completions"]]
    return _stated(parts, f"steps {late[0]['step']} to {late[-1]['step']}") if late else None


def _stated(parts: Sequence[dict[str, Any]], where: str) -> Answers | None:
    """Of completions with these parts, those that state a confidence; None if none does."""
    stated = [x for x in parts if x.get("format") == 1 and x.get("correct") in (0, 1)]
    sure = [x for x in stated if is_number(x.get("confidence")) and 0 <= x["confidence"] <= 1]
    pairs = [(x["confidence"], x["correct"]) for x in sure]
    if not pairs:
        return None
    confidence, correct = np.array(pairs, dtype=float).T
    return Answers(confidence, correct, where)


def in_script(value: object) -> str:
    """JSON that can stand in a <script>: no text in it can end the element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
