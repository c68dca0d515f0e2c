"""Dialogues: tokens, masks, tools, games, and what a run makes of them."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from minigrpo.model.transformer import Transformer
from minigrpo.runtime.rng import uniforms
from minigrpo.types import Completions

from .steps import EOS, SHAPES, make_completions
from .test_sampling import generate

LENGTH, SAMPLES, PROMPTS = 24, 4, 5
STOPS = (EOS, 4, 7)  # so that turns end often

# --- tokens ---------------------------------------------------------------------------------------


def answer_to(ids: Sequence[int]) -> list[int]:
    """What the environment of these tests says: two to four tokens, or the end of the dialogue."""
    if sum(ids) % 7 == 0:
        return []
    return [1 + sum(ids) % 3, *[2] * (len(ids) % 3), 5]


class Stub:
    """Answers turns after a while that differs from turn to turn."""

    def __init__(self, patience: int = 0) -> None:
        self.patience, self.open = patience, dict[int, tuple[int, list[int]]]()

    def submit(self, sequence: int, ids: Sequence[int], room: int) -> None:
        answer = answer_to(ids)
        wait = (sequence * 7 + len(ids)) % (self.patience + 1)
        self.open[sequence] = wait, answer if len(answer) <= room else []

    def replies(self, *, wait: bool) -> dict[int, list[int]]:
        least = min((n for n, _ in self.open.values()), default=0) if wait else 0
        ready = {s: answer for s, (n, answer) in self.open.items() if n <= least}
        self.open = {s: (n - 1, x) for s, (n, x) in self.open.items() if s not in ready}
        return ready


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> Transformer:
    return Transformer(SHAPES[request.param], seed=1).double()


def prompts() -> Completions:
    return make_completions(0, prompts=PROMPTS)


def u() -> torch.Tensor:
    return torch.from_numpy(uniforms(0, "turns", 0, np.arange(PROMPTS), SAMPLES, LENGTH))


@torch.no_grad()
def naive(
    model: Transformer, c: Completions
) -> Iterator[tuple[list[int], list[bool], list[float]]]:
    """The tokens of each dialogue, which of them were sampled, and their log-probs."""
    for p, g in np.ndindex(PROMPTS, SAMPLES):
        prompt, ids, sampled, logps = c.prompt_ids[p, : c.prompt_len[p]].tolist(), [], [], []
        while len(ids) < LENGTH:
            logp = model.logits(torch.tensor([prompt + ids]))[0, -1].log_softmax(-1)
            cdf = logp.exp().cumsum(-1)
            token = int(torch.searchsorted(cdf, u()[p, g, len(ids)].double() * cdf[-1], right=True))
            ids, sampled, logps = [*ids, token], [*sampled, True], [*logps, float(logp[token])]
            if token in STOPS:
                answer = answer_to(ids) if len(ids) < LENGTH else []
                if not answer or len(ids) + len(answer) >= LENGTH:
                    break
                ids, sampled = ids + answer, sampled + [False] * len(answer)
                logps += [0.0] * len(answer)
        yield ids, sampled, logps


@pytest.mark.parametrize(("patience", "at_once"), [(0, 0), (5, 0), (3, 2)])
def test_a_dialogue_is_what_a_plain_forward_makes_of_it(
    model: Transformer, patience: int, at_once: int
) -> None:
    """However long answers take, and whatever else is in the batch."""
    c = prompts()
    found = generate(
        model,
        c.prompt_ids,
        c.prompt_len,
        stops=STOPS,
        max_new_tokens=LENGTH,
        num_samples=SAMPLES,
        u=u(),
        prompts_at_once=at_once,
        dialogues=Stub(patience),
    )
    turns = 0
    for (p, g), (ids, sampled, logps) in zip(
        np.ndindex(PROMPTS, SAMPLES), naive(model, c), strict=True
    ):
        n = len(ids)
        assert found.completion_len[p, g] == n
        assert found.completion_ids[p, g, :n].tolist() == ids
        assert found.completion_mask[p, g, :n].tolist() == sampled
        assert found.sampler_logp is not None
        assert found.sampler_logp[p, g, :n].tolist() == pytest.approx(logps, abs=1e-6)
        turns += sampled.count(False)
    assert turns > PROMPTS * SAMPLES  # there are dialogues to compare
