"""The Python of the pages runs, on a tiny model and without what it would download."""

import re
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from tempfile import mkdtemp
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

import minigrpo

from .tiny import ROOT, tiny_chat_model


def run_blocks(
    text: str, page: str = "recipes", known: Mapping[str, Any] = {}
) -> list[dict[str, Any]]:
    """What the Python blocks of a page with this text define, beside what is known."""
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    own = {**known, "minigrpo": minigrpo, "__name__": page}
    blocks = [{**own, "code": x} for x in code if text in x]
    for block in blocks:
        exec(compile(block["code"], page, "exec"), block)
    return blocks


@pytest.fixture
def train(tmp_path: Path) -> Any:
    small = {
        "model": str(tiny_chat_model(tmp_path / "model", context=900)),
        "prompts_per_step": 2,
        "group_size": 2,
        "max_new_tokens": 4,
        "max_steps": 1,
        "eval_size": 2,
    }
    train = minigrpo.train
    return lambda **given: train(**given | small | {"out_dir": mkdtemp(dir=tmp_path)})


def test_pages_train(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"{a} + 1?", "answer": f"<<{a}+1>>\n#### {a + 1}"} for a in range(8)]
    data = SimpleNamespace(load_dataset=lambda *names: {"train": rows[:6], "test": rows[6:]})
    monkeypatch.setitem(sys.modules, "datasets", data)
    monkeypatch.setattr(minigrpo, "train", train)
    graded = cycle([1.0] * 9 + [0.0] * 7)  # of eight answers to a row, all are right or one is
    own = {
        "rows": [{"prompt": f"{a} + 1?"} for a in range(16)],
        "right": minigrpo.reward(lambda example, text: next(graded)),
    }
    for page in ("recipes", "turns", "finetune", "../README"):
        for block in run_blocks("minigrpo.train(", page, own):
            assert block["run"].summary["status"] == "finished"


def test_the_format_is_paid() -> None:
    (block,) = run_blocks("FORM =")
    example = SimpleNamespace(fields={"solution": 4})
    for said, form, right in (("</answer>\n", 1, 1), ("2</answer>", 1, 0), ("", 0, 0)):
        text = f"<think>\n1 <\n</think>\n<answer>\n4\n{said}"
        assert block["form"](example, text) == form
        assert block["right"](example, text) == right


@pytest.mark.peer
def test_the_judge_is_asked(train: Any) -> None:
    import openai

    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"choices": [{"message": {"content": "Grade: 7."}}]}')

    (judge,) = run_blocks("def judged")
    with ThreadingHTTPServer(("localhost", 0), Server) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://localhost:{server.server_port}"
        judge["client"] = openai.AsyncOpenAI(base_url=url, api_key="...")
        run = train(data=[{"prompt": f"{a} + 1"} for a in range(9)], rewards=judge["judged"])
        server.shutdown()
    assert run.metrics["rewards/judged/mean"] == [0.7]
    assert b" + 1" in asked[0]
