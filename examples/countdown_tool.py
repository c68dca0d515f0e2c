"""Countdown in turns, with a calculator: `minigrpo train --config countdown-tool`."""

from countdown import Problems

from minigrpo.tasks.countdown import evaluate


def calculate(expression: str) -> str:
    """Calculate with whole numbers, + - * / and parentheses.

    Args:
        expression: such as (8 - 2) * 5
    """
    try:
        return str(evaluate(expression))
    except Exception:  # a model may write anything
        return "error"


class CountdownTool(Problems):
    """Problems in which the model may call the calculator before it answers in its last turn."""

    tools = (calculate,)
    difficulty = "3x20"
