"""Teachers (RLT): the reward against plain forwards, the additions, and runs."""

import copy
import doctest
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import minigrpo
from minigrpo import Config, Trainer
from minigrpo.model.chat import ChatTemplate
from minigrpo.model.encoding import decode
from minigrpo.model.packing import PACKINGS
from minigrpo.model.shape import ModelShape
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.model.transformer import Transformer
from minigrpo.runtime.build import make_scorer, make_task, make_token_scoring
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.frozen_model import FrozenModel
from minigrpo.runtime.oom import OOMBackoff
from minigrpo.runtime.token_rewards import TokenBatch
from minigrpo.tasks import additions
from minigrpo.tasks.additions import Additions, students_pairs, teachers_pairs
from minigrpo.tasks.registry import load_task
from minigrpo.tools import evaluate as evaluate_tool
from minigrpo.tools import sample
from minigrpo.types import Completions, Example

from . import test_distributed

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
            columns = zip(f"0{a}", f"0{b}", f"{bits[::-1]}0", strict=True)
            assert "".join(str(sum(map(int, column)) % 10) for column in columns) == solution
            assert example.prompt == f"{a}+{b}\n<solution>{solution}</solution>\n"


def test_additions_are_a_function_of_seed_and_number_and_the_splits_are_disjoint() -> None:
    task = Additions(3, "s")
    assert task.train(5) == Additions(3, "s").train(5) != Additions(4, "s").train(5)
    train = {task.train(number).fields["question"] for number in range(300)}
    assert not train & {task.held_out(number).fields["question"] for number in range(50)}


@pytest.mark.parametrize("shares", [additions.STUDENTS_SHARES, additions.TEACHERS_SHARES])
def test_both_start_from_carries_letters_and_nothing(shares: tuple[float, ...]) -> None:
    task, n = Additions(0, "s"), 300
    students = shares is additions.STUDENTS_SHARES
    counts = [0, 0, 0]
    for number, (prompt, answer) in enumerate(
        (students_pairs if students else teachers_pairs)(n, 0)
    ):
        example = task.train(number)
        explanation, tag, solution = answer.partition("<solution>")
        if students:
            assert prompt == example.fields["question"] + "\n"
            assert tag and solution == example.fields["solution"] + "</solution>"
        else:
            assert prompt == example.prompt and not tag
        kinds = [example.answer, f"<think>{explanation[7:-8]}</think>", "<think></think>"]
        kind = 2 if explanation == kinds[2] else kinds.index(explanation)
        assert kind != 1 or re.fullmatch("[a-h]{6}", explanation[7:-8])
        counts[kind] += 1
    assert counts == pytest.approx([n * share for share in shares], abs=30)


# --- runs -----------------------------------------------------------------------------------------

ASSETS = Path(minigrpo.__file__).parent / "assets"
OPTIONS: dict[str, Any] = {
    "task": "teach",
    "device": "cpu",
    "prompts_per_step": 4,
    "group_size": 3,
    "rollout_batch_size": 2,
    "micro_batch_size": 2,
    "max_steps": 4,
    "save_every": 2,
    "eval_every": 0,
    "eval_size": 6,
    "kl_coef": 0.1,
    "dynamic_sampling": 1,
    "temperature": 0.7,
}


def trained(folder: Path, **changes: Any) -> Trainer:
    trainer = Trainer(Config.of(**{**OPTIONS, **changes, "out_dir": str(folder)}), quiet=True)
    trainer.fit()
    return trainer


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_run_pays_the_three_terms_and_reports_what_the_student_solves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run", max_steps=1)
    first = records(tmp_path / "run", "eval.jsonl")[0]
    assert next(name for name in first if name.endswith("_sampled")) == "solved_sampled"
    assert {*Additions.parts, "reward", "likelihood_sampled"} <= first.keys()
    (row,) = records(tmp_path / "run", "metrics.jsonl")
    paid = sum(row[f"rewards/{name}/mean"] for name in ("likelihood", "kl", "match"))
    assert row["reward"] == pytest.approx(paid, abs=1e-4) and row["reward_std"] > 0
    # greedy and sampled completions of it, each with the student's verdict
    for more in ([], ["--n", "3"]):
        capsys.readouterr()
        sample.main([str(tmp_path / "run"), "--examples", "2", *more])
        said = capsys.readouterr().out
        assert said.count("answer for --loss nll ") == 2 and re.search("right|exact", said)


@pytest.mark.slow
def test_a_run_resumes_and_is_evaluated_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    student = tmp_path / "student.safetensors"
    shutil.copy(ASSETS / "student.safetensors", student)
    whole = trained(tmp_path / "whole", student=str(student))
    trained(tmp_path / "part", student=str(student), stop_after=2)
    resumed = trained(tmp_path / "part", student=str(student), resume="auto")
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)

    evaluate_tool.main([str(tmp_path / "whole"), "--n", "6", "--json", str(tmp_path / "e.json")])
    by_hand = json.loads((tmp_path / "e.json").read_text())["kinds"]["all"]
    last = records(tmp_path / "whole", "eval.jsonl")[-1]
    for name in ("solved", "likelihood", "kl_sampled"):
        assert by_hand[name]["value"] == pytest.approx(last[name], abs=1e-5)

    student.write_bytes(student.read_bytes()[:-4] + bytes(4))
    capsys.readouterr()
    settings = {**OPTIONS, "student": str(student), "resume": "2"}
    Trainer(Config.of(**settings, out_dir=str(tmp_path / "part")))
    assert f"--student {student}: other contents" in capsys.readouterr().err.replace("\n", " ")
    for tool, number in ((evaluate_tool, "--n"), (sample, "--examples")):
        tool.main([str(tmp_path / "whole"), number, "1"])
        said = "".join(capsys.readouterr().err.split())
        assert f"--student{student}:othercontentsthanwhen" in said


def try_out(**changes: Any) -> None:
    """What a run tries before it begins, without its own model."""
    config = Config.of(**{**OPTIONS, **changes})
    task, scoring = make_task(config), make_token_scoring(config, CHESS, torch.device("cpu"))
    scoring.try_out(make_scorer(config, task).token_sources, task, context=72)


def refused(**changes: Any) -> str:
    with pytest.raises(ValueError, match=".") as caught:
        try_out(**changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_work_is_one_line_before_any_work(tmp_path: Path) -> None:
    assert "--task teach needs --student" in refused(student="")
    assert re.match("--student .*nowhere", refused(student=str(tmp_path / "nowhere")))
    settings = {**OPTIONS, "student": str(tmp_path / "nowhere"), "out_dir": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match="nowhere"):
        Trainer(Config.of(**settings), quiet=True)
    assert not (tmp_path / "run").exists()
    assert "no true explanations" in refused(loss="nll", kl_coef=0.0)
    small = Transformer(ModelShape(23, context=96, layers=1, width=16, heads=2))
    small.save_pretrained(tmp_path / "small.safetensors")
    assert "has 23 tokens" in refused(student=str(tmp_path / "small.safetensors"))
    short = Transformer(ModelShape(CHESS.n_vocab, context=40, layers=1, width=16, heads=2))
    short.save_pretrained(tmp_path / "short.safetensors")
    said = refused(student=str(tmp_path / "short.safetensors"))
    assert "is longer than its context of 40" in said


REWARDS = """
import minigrpo, numpy, torch

@minigrpo.reward(tokens=True)
def {name}(batch):
    spans, logp = batch.spans("think"), batch.completions.sampler_logp
    assert logp.shape[:2] == spans.shape[:2] and batch.device.type == "cpu"
    model = batch.model("{model}")
    assert batch.model("{model}").model is model.model
    own = model.logp(batch.completions)
    return {result}
"""


def with_rewards(folder: Path, name: str, result: str) -> dict[str, Any]:
    file = folder / f"{name}.py"
    file.write_text(REWARDS.format(name=name, result=result, model=ASSETS / "teacher.safetensors"))
    return {"rewards": str(file), "kl_coef": 0.0}


def test_a_users_function_sees_tokens_and_models(tmp_path: Path) -> None:
    """Here the model is the one that samples, before its first update."""
    settings = with_rewards(tmp_path, "gap", "(own - logp).abs().amax(-1)")
    trained(tmp_path / "run", **settings, max_steps=1)
    (row,) = records(tmp_path / "run", "metrics.jsonl")
    assert 0 <= row["rewards/gap/mean"] < 1e-4
    first, last = records(tmp_path / "run", "eval.jsonl")
    assert first["gap_sampled"] < 1e-4 and first["gap_sampled"] < last["gap_sampled"]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("logp.sum()", "numbers, one per completion"),
        ("[[1.0], [2.0, 3.0]]", "numbers, one per completion"),
        ("numpy.full(logp.shape[:2], numpy.nan)", "not a finite number"),
        ("batch.model('/no/where').logp(batch.completions)", "/no/where"),
    ],
)
def test_an_error_in_a_users_function_ends_the_run_in_one_line(
    tmp_path: Path, result: str, words: str
) -> None:
    said = refused(**with_rewards(tmp_path, "bad", result))
    assert said.startswith("reward bad: ") and words in said


TASK = """
import numpy
from minigrpo.tasks.additions import Additions

class Both:
    parts = {"length": 0.5, "tokens": 2.0}
    token_parts = ("tokens",)

    def __init__(self, seed):
        self.additions = Additions(seed, "none")

    def train(self, number):
        return self.additions.train(number)

    held_out = train

    def score(self, example, text):
        return {"length": len(text)}

    def score_tokens(self, batch):
        assert type(batch.examples[0]).__name__ == "Example"
        return {"tokens": batch.completions.completion_mask.sum(-1)}
"""


def test_a_task_of_ones_own_may_score_texts_and_tokens(tmp_path: Path) -> None:
    file = tmp_path / "both.py"
    file.write_text(TASK)
    own = {"task": str(file), "init_from": str(ASSETS / "teacher.safetensors"), "max_steps": 1}
    trained(tmp_path / "run", **own, max_new_tokens=6, kl_coef=0.0)
    (row,) = records(tmp_path / "run", "metrics.jsonl")
    length, tokens = (row[f"rewards/{name}/mean"] for name in ("length", "tokens"))
    assert tokens == row["completions/mean_length"] and length > 0
    assert row["reward"] == pytest.approx(0.5 * length + 2 * tokens)


def test_functions_of_tokens_have_no_time_limit_and_no_floor() -> None:
    for options in ({"timeout_s": 1.0}, {"floor": 1.0}, {"batched": True}):
        with pytest.raises(ConfigError):
            minigrpo.reward(tokens=True, **options)(lambda_free)
    assert minigrpo.reward(tokens=True)(lambda_free).kind == "tokens"


def lambda_free(batch: TokenBatch) -> Any:
    return batch.completions.completion_mask.sum(-1)


# --- data -----------------------------------------------------------------------------------------


def test_lessons_are_read_from_both_formats(tmp_path: Path) -> None:
    file = tmp_path / "lessons.jsonl"
    rows = [{"question": f"{n}+1?", "solution": f"{n + 1}", "id": n} for n in range(20)]
    rows += [{"question": f"{n}/2?", "answer": f"<<{n}/2=1>>1\n#### 1"} for n in range(20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task("teach", seed=0, data=str(file), student="s")
    found = [task.train(number) for number in range(60)]
    solutions = {example.fields["question"]: example.fields["solution"] for example in found}
    assert solutions["4+1?"] == "5" and solutions["4/2?"] == "1\n#### 1"
    example = next(x for x in found if x.fields["question"] == "4+1?")
    assert example.fields["id"] == 4 and "4+1?" in example.prompt and "5" in example.prompt


def test_a_question_is_on_one_side_with_all_of_its_solutions(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "solution": f"{way}"} for i in range(40) for way in range(3)]
    path = tmp_path / "lessons.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task: Any = load_task("teach", seed=0, data=str(path), student="x")
    trained = {task.train(i).fields["question"] for i in range(len(rows) - task.num_held_out)}
    held_out = {task.held_out(i).fields["question"] for i in range(task.num_held_out)}
    assert len(trained | held_out) == 40 and not trained & held_out


@pytest.mark.parametrize(
    "line", ["[1]", '{"question": "a"}', '{"question": "", "solution": "b"}', '{"question": 1}']
)
def test_a_line_without_question_or_solution_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "lessons.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"lessons.jsonl, line 1: must be an object like"):
        load_task("teach", seed=0, data=str(file), student="s")


def test_a_student_with_a_chat_template_is_asked_by_it() -> None:
    asked = student()
    asked.tokenizer = copy.copy(CHESS)
    asked.tokenizer.chat = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}=")
    prompt = Additions(0, "s")._prompt(asked, Additions(0, "s").train(0))
    question = Additions(0, "s").train(0).fields["question"]
    assert CHESS.decode(prompt) == f"[{question}]="


@pytest.mark.slow
@pytest.mark.usefixtures("no_orphans")
def test_two_processes_get_the_rewards_of_one(tmp_path: Path) -> None:
    settings = {**OPTIONS, "max_steps": 1}
    there = {"init_from": "shipped", "max_new_tokens": 24, "out_dir": tmp_path / "two"}
    process = test_distributed.start(**{**settings, **there})
    output = test_distributed.finish(process)
    assert process.returncode == 0, output
    trained(tmp_path / "one", **settings)
    (one,), (two,) = (records(tmp_path / name, "metrics.jsonl") for name in ("one", "two"))
    for name in (f"rewards/{part}/mean" for part in Additions.parts):
        assert one[name] == pytest.approx(two[name], abs=1e-3), name
