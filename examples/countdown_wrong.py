"""countdown_tool.py with a calculator that adds one to each whole result from 0 up: is it used?

    minigrpo evaluate runs/tool-0 --task examples/countdown_wrong.py

A model that ignores the results solves as many problems as with the right calculator.
"""

import countdown_tool


def calculate(expression: str) -> str:
    """Calculate, and add one.

    Args:
        expression: such as (8 - 2) * 5
    """
    result = countdown_tool.calculate(expression)
    return str(int(result) + 1) if result.isdigit() else result


class WrongByOne(countdown_tool.CountdownTool):
    tools = (calculate,)
