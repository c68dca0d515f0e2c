"""The example scripts run as their first lines say."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from .chat_model import write_model

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_a_chat_model_is_trained_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["chat.py", str(model)])
    runpy.run_path(str(EXAMPLES / "chat.py"), run_name="__main__")
    answers = r"""^\d+\+\d+= ['"].*['"], solved: [01]$"""
    asked = re.findall(answers, capsys.readouterr().out, re.MULTILINE)
    assert len(asked) == 8  # four questions, before and after
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["step"] == 10
    metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["rewards/brevity/mean"] > 0 and "rewards/solved/mean" in metrics
    weighed = metrics["rewards/solved/mean"] + 0.1 * metrics["rewards/brevity/mean"]
    assert metrics["reward"] == pytest.approx(weighed)

    monkeypatch.setattr(sys, "argv", ["chat.py"])
    with pytest.raises(SystemExit, match="usage: python examples/chat.py MODEL"):
        runpy.run_path(str(EXAMPLES / "chat.py"), run_name="__main__")
