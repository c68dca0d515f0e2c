"""The Python of docs/recipes.md runs, on a tiny model and without what it would download."""

import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

import minigrpo

from . import tiny


def block(name: str) -> dict[str, Any]:
    """What the only Python block of the page with this text defines."""
    page = (Path(__file__).parents[1] / "docs/recipes.md").read_text("utf-8")
    (code,) = [x for x in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if name in x]
    exec(compile(code, "recipes.md", "exec"), defined := {"__name__": "recipe"})
    return defined


@pytest.fixture
def train(tmp_path: Path) -> Any:
    small = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4, "max_steps": 1}
    small |= {"model": str(tiny.tiny_chat_model(tmp_path / "model", context=900)), "eval_size": 2}
    return lambda f=minigrpo.train, **x: f(**{**x, **small, "out_dir": str(tmp_path / "run")})


def test_gsm8k_is_read_and_the_tool_is_one(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"{a} + 1?", "answer": f"<<{a}+1>>\n#### {a + 1}"} for a in range(8)]
    data = SimpleNamespace(load_dataset=lambda *names: {"train": rows[:6], "test": rows[6:]})
    monkeypatch.setitem(sys.modules, "datasets", data)
    monkeypatch.setattr(minigrpo, "train", train)
    assert "rewards/correct/mean" in block("load_dataset")["run"].metrics
    assert minigrpo.turns.tools.Tool("multiply", block("def multiply")["multiply"]).schema


def test_the_format_is_paid_and_the_judge_is_asked(train: Any) -> None:
    form, right = map(block("FORM =").get, ("form", "right"))
    example, text = SimpleNamespace(fields={"solution": 4}), "<think>\n1 <\n</think>\n<answer>\n4\n"
    for said, paid in (("</answer>\n", (1, 1)), ("2</answer>", (1, 0)), ("", (0, 0))):
        assert (form(example, text + said), right(example, text + said)) == paid

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200), self.end_headers()
            self.wfile.write(b'{"choices": [{"message": {"content": "Grade: 7."}}]}')

    asked, judge = list[bytes](), block("def ask")
    with ThreadingHTTPServer(("localhost", 0), Server) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        judge["URL"] = f"http://localhost:{server.server_port}"
        run = train(data=[{"prompt": f"{a} + 1"} for a in range(9)], rewards=judge["judged"])
        server.shutdown()
    assert run.metrics["rewards/judged/mean"] == [0.7] and b" + 1" in asked[0]
