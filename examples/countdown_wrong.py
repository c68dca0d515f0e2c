"""countdown_tool.py with a calculator that says one too much: does a model use what it says?

    minigrpo evaluate runs/tool-0 --task examples/countdown_wrong.py

A model that does not solves as many problems as with a calculator that is right.
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
