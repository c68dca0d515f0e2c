"""How good a model is: greedy and sampled answers to held-out examples that no training ever sees."""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import tiktoken
import torch

from .model import GPT
from .randomness import uniforms
from .rewards import RewardScorer
from .rollout import decode, encode_prompts
from .sampling import generate
from .types import Example, Task

BATCH = 256  # prompts decoded together


def answer(
    model: GPT,
    tokenizer: tiktoken.Encoding,
    examples: list[Example],
    *,
    max_new_tokens: int,
    seed: int | None = None,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[str]:
    """One completion of each example: greedy, or at temperature 1 if a seed is given."""
    texts: list[str] = []
    for a in range(0, len(examples), BATCH):
        part = examples[a : a + BATCH]
        prompt_ids, prompt_len = encode_prompts(tokenizer, part, model.shape.context - max_new_tokens)
        u = None
        if seed is not None:
            rows = np.array([example.index for example in part])
            u = torch.from_numpy(uniforms(seed, "evaluate", 0, rows, 1, max_new_tokens)).to(model.device)
        with autocast():
            completions = generate(
                model,
                prompt_ids.to(model.device),
                prompt_len.to(model.device),
                eos=tokenizer.eot_token,
                max_new_tokens=max_new_tokens,
                u=u,
            )
        texts += [group[0] for group in decode(tokenizer, completions.to("cpu"))]
    return texts


def evaluate(
    model: GPT,
    task: Task,
    tokenizer: tiktoken.Encoding,
    scorer: RewardScorer,
    *,
    size: int,
    max_new_tokens: int,
    seed: int,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, float]:
    """Score the first `size` held-out examples.

    Returns:
        exact: share of greedy completions that are the whole truth, to the letter. exact_sampled: the same at temperature 1.
        The reward parts, and reward: means over the greedy completions.
        exact/<kind> and count/<kind>: the same by kind of question.
    """
    examples = [task.held_out(i) for i in range(size)]
    greedy = answer(model, tokenizer, examples, max_new_tokens=max_new_tokens, autocast=autocast)
    sampled = answer(model, tokenizer, examples, max_new_tokens=max_new_tokens, seed=seed, autocast=autocast)
    table = scorer.score(examples, [[text] for text in greedy])
    right = [text == example.answer for text, example in zip(greedy, examples, strict=True)]
    by_kind: dict[str, list[bool]] = defaultdict(list)
    for example, hit in zip(examples, right, strict=True):
        by_kind[example.kind].append(hit)
    return {
        "exact": float(np.mean(right)),
        "exact_sampled": float(np.mean([t == e.answer for t, e in zip(sampled, examples, strict=True)])),
        **{name: float(scores.mean()) for name, scores in table.parts.items()},
        "reward": float(table.total.mean()),
        **{f"exact/{kind}": float(np.mean(hits)) for kind, hits in sorted(by_kind.items())},
        **{f"count/{kind}": float(len(hits)) for kind, hits in sorted(by_kind.items())},
    }
