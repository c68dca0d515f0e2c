"""Sums and differences of numbers up to 30, for a published chat model.

    python examples/arithmetic.py > arithmetic.jsonl
    minigrpo train --config arithmetic --out-dir runs/arithmetic

`python examples/from_gguf.py smollm2 smollm2` makes the model's folder. The last number of an
answer counts, so the model is free in how it gets there.
"""

import json
import re

import minigrpo


@minigrpo.reward(success=True)
def right(example: minigrpo.Example, text: str) -> float:
    """1 if the last number in the text is the true one; 0.27 and 1/27 are numbers too."""
    return float(re.findall(r"-?\d+(?:[./]\d+)*", text)[-1:] == [example.fields["answer"]])


if __name__ == "__main__":
    numbers = range(31)
    problems = {f"{a} + {b}": a + b for a in numbers for b in numbers}
    problems |= {f"{a} - {b}": a - b for a in numbers for b in range(a + 1)}
    for problem, value in problems.items():
        question = {"role": "user", "content": f"What is {problem}?"}
        print(json.dumps({"prompt": [question], "answer": str(value)}))
