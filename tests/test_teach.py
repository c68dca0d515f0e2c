"""Teachers (RLT): the reward against plain forwards, the additions, and runs."""

import copy
import doctest
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from minigrpo.model.encoding import decode
from minigrpo.model.packing import PACKINGS
from minigrpo.model.shape import ModelShape
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.model.transformer import Transformer
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.frozen_model import FrozenModel
from minigrpo.runtime.oom import OOMBackoff
from minigrpo.runtime.token_rewards import TokenBatch
from minigrpo.tasks import additions
from minigrpo.tasks.additions import Additions, students_pairs, teachers_pairs
from minigrpo.types import Completions, Example

CHESS = load_tokenizer("chess")
SHAPE = ModelShape(CHESS.n_vocab, context=96, layers=2, width=16, heads=2)
TEACHER, STUDENT = (Transformer(SHAPE, seed=seed).double() for seed in (1, 2))
TEMPERATURE = 0.7
EXPLANATIONS = ["010111", "01", "0", "", "010110", "010111"]


def student(packing: str = "prefix-tree", ran: list[int] | None = None) -> FrozenModel:
    def counting(completions: Completions) -> Any:
        packed = PACKINGS[packing](completions)
        if ran is not None:
            ran.append(len(packed.tokens.ids))
        return packed

    return FrozenModel(
        STUDENT,
        CHESS,
        name="--student s",
        packing=counting,
        temperature=1.0,
        backoff=OOMBackoff("reward", "--micro-batch-size", 0),
        autocast=nullcontext,
    )


def plain_logp(model: Transformer, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """`[n]` log-probs of the n tokens after a prompt, by a plain causal forward of one text."""
    logits = model.logits(torch.tensor([[*prompt, *ids]]))[0] / TEMPERATURE
    logp = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return logp.gather(1, torch.tensor(ids)[:, None])[:, 0].detach()


def batch_of(examples: list[Example], texts: list[list[str]], asked: FrozenModel) -> TokenBatch:
    """What the policy TEACHER sampled, with its log-probs."""
    prompts = [CHESS.encode_prompt(example.prompt) for example in examples]
    rows = [[[*CHESS.encode(text), CHESS.eot] for text in group] for group in texts]
    completions = FrozenModel.completions(prompts, rows)
    logp = torch.zeros(completions.completion_ids.shape, dtype=torch.float64)
    for p, g in np.ndindex(*logp.shape[:2]):
        logp[p, g, : len(rows[p][g])] = plain_logp(TEACHER, prompts[p], rows[p][g])
    completions = Completions(**{**vars(completions), "sampler_logp": logp})
    assert decode(CHESS, completions) == texts
    return TokenBatch(
        examples, texts, completions, CHESS, torch.device("cpu"), TEMPERATURE, lambda name: asked
    )


def example_batch(asked: FrozenModel) -> TokenBatch:
    examples = [Additions(0, "s").train(number) for number in range(3)]
    return batch_of(examples, [[f"<think>{x}</think>" for x in EXPLANATIONS]] * 3, asked)


def test_the_worked_example_of_carries_is_what_the_code_computes() -> None:
    result = doctest.testmod(additions)
    assert result.attempted == 1 and not result.failed


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_reward_is_that_of_plain_forwards(packing: str) -> None:
    """The published formula, from one text at a time."""
    batch = example_batch(student(packing))
    parts = Additions(0, "s").score_tokens(batch)
    for p, g in np.ndindex(3, len(EXPLANATIONS)):
        fields, explanation = batch.examples[p].fields, CHESS.encode(EXPLANATIONS[g])
        opening, closing = CHESS.encode("<think>"), CHESS.encode("</think>")
        before, solution = CHESS.encode("<solution>"), CHESS.encode(fields["solution"])
        text = [*opening, *explanation, *closing, *before, *solution]
        question = CHESS.encode(fields["question"] + "\n")
        logp = plain_logp(STUDENT, question, text)
        of_solution = logp[-len(solution) :]
        assert parts["likelihood"][p, g] == pytest.approx(
            float(of_solution.mean() + 0.01 * of_solution.min()), abs=1e-6
        )
        inside = slice(len(opening), len(opening) + len(explanation))
        prompt = CHESS.encode_prompt(batch.examples[p].prompt)
        teacher = plain_logp(TEACHER, prompt, text)[inside]
        ratio = teacher - logp[inside]
        expected = -3 * ratio.mean() - 0.03 * ratio.max() if len(ratio) else torch.zeros(())
        assert parts["kl"][p, g] == pytest.approx(float(expected), abs=1e-6)
        assert parts["match"][p, g] == 0
        assert parts["solved"][p, g] == float((of_solution.exp() > 0.5).all())


def test_the_student_runs_each_question_and_each_common_beginning_once() -> None:
    ran: dict[str, list[int]] = {name: [] for name in PACKINGS}
    for name, counts in ran.items():
        Additions(0, "s").score_tokens(example_batch(student(name, counts)))
    question, tags, solution = 14, len("<think></think>"), len("<solution>0754413</solution>")
    each = [question + tags + len(x) + solution - 1 for x in EXPLANATIONS]
    assert ran["repeated"][0] == 3 * sum(each)
    distinct = sum(n - question for n, x in zip(each[1:], EXPLANATIONS[1:], strict=True))
    assert ran["shared-prompt"][0] == 3 * (question + distinct)
    assert ran["prefix-tree"][0] < ran["shared-prompt"][0]


@pytest.mark.parametrize("text", ["", "010111", "<think>010111", "010111</think>"])
def test_missing_tags_cost_one_in_each_term(text: str) -> None:
    example = Additions(0, "s").train(0)
    batch = batch_of([example], [[text, "<think>0</think>"]], student())
    parts = Additions(0, "s").score_tokens(batch)
    assert [parts[name][0, 0] for name in ("likelihood", "kl", "match")] == [-1, -1, -1]
    assert parts["match"][0, 1] == 0 and parts["likelihood"][0, 1] < -1


def test_the_terms_weigh_one_and_the_measures_nothing() -> None:
    assert Additions.parts == {"likelihood": 1, "kl": 1, "match": 1, "solved": 0, "unaided": 0}


def test_text_around_the_tags_is_not_shown_to_the_student() -> None:
    example = Additions(0, "s").train(0)
    texts = ["<think>0101</think>", "so: <think>0101</think> done", "<think>0101</think><think>"]
    parts = Additions(0, "s").score_tokens(batch_of([example], [texts], student()))
    assert np.ptp(parts["likelihood"]) < 1e-12


def test_another_vocabulary_is_refused() -> None:
    asked = student()
    asked.tokenizer = copy.copy(CHESS)
    asked.tokenizer.tokens = {**CHESS.tokens, 5: b"another"}
    with pytest.raises(ConfigError, match="same vocabulary"):
        Additions(0, "s").score_tokens(example_batch(asked))


def test_a_teacher_needs_a_student() -> None:
    with pytest.raises(ConfigError, match="--task teach needs --student"):
        Additions(0, "")


# --- the additions --------------------------------------------------------------------------------


def test_additions_are_right_and_their_carries_lead_to_the_solution() -> None:
    task = Additions(3, "s")
    for number in range(200):
        for example in (task.train(number), task.held_out(number)):
            a, b = example.fields["question"].split("+")
            solution, bits = example.fields["solution"], example.answer[7:-8]
            assert int(a) + int(b) == int(solution) and len(solution) == len(a) + 1 == 7
            columns = zip(f"0{a}", f"0{b}", f"{bits}0", strict=True)
            assert "".join(str(sum(map(int, column)) % 10) for column in columns) == solution
            assert example.prompt == f"{a}+{b}\n<solution>{solution}</solution>\n"


def test_additions_are_a_function_of_seed_and_number_and_the_splits_are_disjoint() -> None:
    task = Additions(3, "s")
    assert task.train(5) == Additions(3, "s").train(5) != Additions(4, "s").train(5)
    train = {task.train(number).fields["question"] for number in range(500)}
    assert not train & {task.held_out(number).fields["question"] for number in range(500)}


def test_the_student_starts_from_true_carries_and_the_teacher_from_random_ones() -> None:
    task, seen = Additions(0, "s"), set[bool]()
    for number, (prompt, answer) in enumerate(students_pairs(50, 0)):
        example = task.train(number)
        assert prompt == example.fields["question"] + "\n"
        explained = answer.startswith(example.answer)
        assert explained or answer.startswith("<think></think>")
        assert answer.endswith(f"<solution>{example.fields['solution']}</solution>")
        seen.add(explained)
    assert seen == {True, False}
    pairs = list(teachers_pairs(50, 0))
    assert [prompt for prompt, _ in pairs] == [task.train(n).prompt for n in range(50)]
    right = sum(answer == task.train(n).answer for n, (_, answer) in enumerate(pairs))
    assert right < 10 and len({answer for _, answer in pairs}) > 20
