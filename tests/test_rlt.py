"""RLT: the reward against plain forwards of single texts."""

import doctest
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor

from examples import rlt
from examples.rlt import RLT, find_span
from minigrpo.model.frozen_model import FrozenModel
from minigrpo.model.transformer import ModelShape, Transformer
from minigrpo.task import TokenBatch
from minigrpo.text.encoding import to_completions
from minigrpo.text.tokenizer import load_tokenizer
from minigrpo.types import ConfigError, Example

from .steps import attending
from .tiny import refused

CHESS = load_tokenizer("chess")
SHAPE = ModelShape(CHESS.n_vocab, context=96, layers=attending(2), width=16, heads=2)
TEACHER, STUDENT = (Transformer(SHAPE, seed=seed).double() for seed in (1, 2))
TEMPERATURE = 0.7
EXPLANATIONS = ["010111", "01", "0", "", "010110", "010111"]


def plain_logp(model: Transformer, prompt: list[int], ids: list[int]) -> Tensor:
    """`[n]` log-probs of the n tokens after a prompt, by a plain causal forward of one text."""
    logits = model.logits(torch.tensor([[*prompt, *ids]]))[0] / TEMPERATURE
    logp = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logp.gather(1, torch.tensor(ids)[:, None])[:, 0].detach()


def student(tokenizer: Any = CHESS, model: Transformer = STUDENT) -> FrozenModel:
    def at_once(function: Any, num_prompts: int) -> Tensor:
        return function(num_prompts)

    return FrozenModel(model, tokenizer, "prefix-tree", "student", at_once, nullcontext, False)


def batch_of(
    examples: Sequence[Example], texts: list[list[str]], asked: FrozenModel | None = None
) -> TokenBatch:
    """What the policy TEACHER sampled, with its log-probs."""
    prompts = [[*CHESS.prefix, *CHESS.encode(example.prompt)] for example in examples]
    rows = [[[*CHESS.encode(text), CHESS.eot] for text in group] for group in texts]
    completions = to_completions(prompts, rows)
    logp = torch.zeros(completions.completion_ids.shape, dtype=torch.float64)
    for p, prompt in enumerate(prompts):
        for g, row in enumerate(rows[p]):
            logp[p, g, : len(row)] = plain_logp(TEACHER, prompt, row)
    whole = replace(completions, sampler_logp=logp)
    model = asked or student()
    return TokenBatch(examples, texts, whole, TEMPERATURE, CHESS.decode, lambda name: model)


def test_the_reward_is_the_published_formula() -> None:
    task = RLT(0)
    examples = [task.train(number) for number in range(3)]
    texts = [f"<think>{x}</think>" for x in EXPLANATIONS]
    scores = task.score_tokens(batch_of(examples, [texts] * 3))
    assert {*scores} == {*task.reward_weights} == {*task.token_rewards}
    before = CHESS.encode("<solution>")
    opening = CHESS.encode("<think>")
    closing = CHESS.encode("</think>")
    for p, example in enumerate(examples):
        solution = CHESS.encode(example.fields["solution"])
        question = CHESS.encode(example.fields["students_prompt"])
        prompt = CHESS.encode(example.prompt)
        for g, text in enumerate(EXPLANATIONS):
            explanation = CHESS.encode(text)
            ids = [*opening, *explanation, *closing, *before, *solution]
            student_logp = plain_logp(STUDENT, question, ids)
            of_solution = student_logp[-len(solution) :]
            likelihood = of_solution.mean() + 0.01 * of_solution.min()
            inside = slice(len(opening), len(opening) + len(explanation))
            ratio = plain_logp(TEACHER, prompt, ids)[inside] - student_logp[inside]
            penalty = -3 * ratio.mean() - 0.03 * ratio.max() if explanation else 0.0
            expected = {
                "likelihood": float(likelihood),
                "kl": float(penalty),
                "match": 0.0,
                "solved": float((of_solution.exp() > 0.5).all()),
            }
            found = {name: scores[name][p, g] for name in expected}
            assert found == pytest.approx(expected)
        without_explanation = EXPLANATIONS.index("")
        assert (scores["unaided"][p] == scores["solved"][p, without_explanation]).all()


def test_missing_tags_cost_one_in_each_term() -> None:
    task = RLT(0)
    texts = ["", "010111", "<think>010111", "010111</think>", "</think><think>", "<think>0</think>"]
    scores = task.score_tokens(batch_of([task.train(0)], [texts]))
    for name in ("likelihood", "kl", "match"):
        assert scores[name][0, :5].tolist() == [-1] * 5
    assert scores["match"][0, 5] == 0
    assert scores["likelihood"][0, 5] < -1


def test_tags_are_found_however_they_are_split() -> None:
    assert not doctest.testmod(rlt).failed
    pieces = {  # with the tags, between them
        ("a", "<think>", "b", "c", "</think>", "d"): ([1, 2, 3, 4], [2, 3]),
        ("a<thi", "nk>b", "</", "think>d"): ([0, 1, 2, 3], []),
        ("<think>b</think>",): ([0], []),
        ("<think>", "", "", "€", "</think>"): ([0, 1, 2, 3, 4], [1, 2, 3]),
        ("<think>", "</think>", "<think>x</think>"): ([0, 1], []),
        ("<think>", "a"): ([], []),
        ("</think>", "<think>"): ([], []),
    }
    for text, expected in pieces.items():
        shown, inside = find_span(text)
        tokens = [*range(len(text))]
        assert (tokens[shown], tokens[inside]) == expected, text
        assert inside.stop >= shown.start  # or places in what is shown would be negative


def test_another_vocabulary_is_refused() -> None:
    model = json.loads(CHESS.engine.to_str())
    vocab = model["model"]["vocab"]
    vocab["0"], vocab["1"] = vocab["1"], vocab["0"]
    other = replace(CHESS, engine=tokenizers.Tokenizer.from_str(json.dumps(model)))
    batch = batch_of([RLT(0).train(0)], [["<think>0</think>"]], student(other))
    with pytest.raises(ConfigError):
        RLT(0).score_tokens(batch)


def test_lines_have_a_solution_or_gsm8ks_answer() -> None:
    rows = [
        {"question": "48/2?", "answer": "48/2=<<48/2=24>>24"},
        {"question": "1+1?", "solution": "two", "answer": "2"},
    ]
    task = RLT(0, (), [rows], student="somebody")
    first, second = task.held_out(0), task.held_out(1)
    assert first.fields["solution"] == "48/2=24"
    assert second.fields["solution"] == "two"
    assert "48/2=24" in first.prompt
    assert "<<" not in first.prompt
    assert task.student == "somebody"
    refused(RLT, 0, (), [rows])  # the shipped student knows nothing but additions
    for nothing in ("", " ", "<<1+1=2>>"):  # beside GSM8K's notes
        refused(RLT, 0, (), [[*rows, {"question": "1?", "solution": nothing}]], student="somebody")


def test_the_shipped_student_solves_with_true_carries_and_rarely_without() -> None:
    task = RLT(0)
    model = Transformer.from_pretrained(Path(task.student))
    examples = [task.held_out(i) for i in range(60)]
    for fields in (x.fields for x in examples):
        assert sum(map(int, fields["students_prompt"].split("+"))) == int(fields["solution"])
    texts = [[x.answer, "<think>abcdef</think>"] for x in examples]
    scores = task.score_tokens(batch_of(examples, texts, student(CHESS, model)))
    with_carries, with_junk = scores["solved"].mean(0)
    assert with_carries > 0.9
    assert with_junk < 0.7
    assert scores["unaided"].mean() < 0.6
