"""The tools that work on a finished run: sample, evaluate, export, curves."""

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

from minigrpo import Config, Trainer, Transformer
from minigrpo.evaluate import evaluate as evaluate_in_training
from minigrpo.model.encoding import decode
from minigrpo.model.shape import ModelShape
from minigrpo.model.tokenizer import Tokenizer, load_tokenizer
from minigrpo.model.weights import export_model
from minigrpo.runtime.checkpoint import path_of
from minigrpo.runtime.logging import Screen
from minigrpo.runtime.measures import answer_in_words
from minigrpo.tools import boards, curves, evaluate, export, sample
from minigrpo.tools.loading import ModelSelection, load
from minigrpo.types import Example

from . import bpe
from .chat_model import QWEN2
from .gradients import TINY
from .test_chat import write as chat_files
from .test_checkpoint import damage

SUMS = str(Path(__file__).parent.parent / "examples" / "sums.jsonl")
START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with two earlier moves in its prompts, and a checkpoint per step."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    options = {
        **TINY,
        "max_steps": 2,
        "save_every": 1,
        "eval_every": 0,
        "history": 2,
        "context": 160,
    }
    Trainer(Config.of(**{**options, "out_dir": str(folder)}), quiet=True).fit()
    return folder


def call(tool: ModuleType, *argv: object) -> None:
    tool.main([str(word) for word in argv])


# --- which weights --------------------------------------------------------------------------------


def test_a_runs_newest_whole_checkpoint_is_used_and_a_damaged_one_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, warned = Path(shutil.copytree(run, tmp_path / "copy")), list[str]()
    screen = Screen(quiet=True)
    monkeypatch.setattr(screen, "warn", warned.append)
    (copy / "model.safetensors").unlink()  # a run that was killed has none
    newest = load(ModelSelection(copy), screen)
    assert newest.name == str(path_of(copy / "checkpoints", 2)) and not warned
    final = Transformer.from_pretrained(run)
    ids = torch.arange(30)[None]
    assert torch.equal(newest.sampler.model.logits(ids), final.logits(ids))
    assert newest.config.task.history == 2
    damage(path_of(copy / "checkpoints", 2) / "state.pt")
    before = load(ModelSelection(copy), screen)
    assert before.name == str(path_of(copy / "checkpoints", 1)) and "step_000002" in warned[0]
    assert not torch.equal(before.sampler.model.logits(ids), final.logits(ids))


def test_without_checkpoints_it_is_model_safetensors_and_without_that_one_line(
    run: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    shutil.rmtree(copy / "checkpoints")
    assert load(ModelSelection(copy), Screen(quiet=True)).name == str(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match="without a whole checkpoint, and without model.safetensors"
    ):
        load(ModelSelection(copy), Screen(quiet=True))


def test_a_model_file_and_the_word_shipped_have_the_defaults(run: Path) -> None:
    assert load(
        ModelSelection(run / "model.safetensors", history=2), Screen(quiet=True)
    ).config == Config.of(history=2)
    assert (
        load(ModelSelection(Path("shipped")), Screen(quiet=True)).sampler.model.shape.width == 128
    )


# --- sample ---------------------------------------------------------------------------------------


def test_a_position_of_ones_own(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(sample, run, "--fen", START, "--move", "e2e4", "--before", "a2a3,a7a6,h2h3")
    out = capsys.readouterr().out
    assert f"prompt      A: {START}+e2e4+a7a6,h2h3+\n" in out  # the run tells two moves
    assert (
        "truth       rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 1+0.001+0+0\n" in out
    )
    assert "completion  " in out and "   wrong" in out and "4 [.][.][.][.][P][.][.][.]" in out


def test_samples_of_held_out_examples(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(sample, run, "--examples", 2, "--n", 3)
    first = capsys.readouterr().out
    assert first.count("prompt      A: ") == 2
    assert first.count("   1 of 3") == 6
    call(sample, run, "--examples", 2, "--n", 3)
    assert capsys.readouterr().out == first
    call(sample, run, "--examples", 2, "--n", 3, "--seed", 5)
    assert capsys.readouterr().out != first


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nn", "3"], "--nn"),
        (["--n", "x"], "--n"),
        (["--fen", "8/8", "--move", "e2e4"], "--fen '8/8'"),
        (
            ["--fen", START.replace("K", "Q", 1), "--move", "e2e4"],
            "not a legal position (NO_WHITE_KING",
        ),
        (["--fen", START, "--move", "e2"], "--move and --before take moves"),
        (["--fen", START], "--fen and --move go together"),
        (
            ["--fen", START, "--move", "e2e4", "--before", "a2a3", "--history", "0"],
            "--before goes with --history",
        ),
        (["--examples", "0"], "--examples at least 1"),
        (["--max-new-tokens", "160"], "--max-new-tokens must leave room"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere: must be auto, chess, gpt2 or a path"),
        (["--data", SUMS, "--fen", START, "--move", "e2e4"], "chess-env"),
    ],
    ids=lambda value: "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    run: Path, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        call(sample, run, *argv)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and not out
    assert words in err and err.count("\n") == 1


def test_a_random_attempt_is_neither_called_the_truth_nor_right_where_it_is_repeated() -> None:
    """What --loss nll learns from in the task countdown reaches the target only by chance."""
    console, example = Console(width=100), Example("7 3 -> 4", "7+3")
    with console.capture() as capture:
        sample.show(
            *(console, example, ["7+3", "7-3"], {"7-3"}),
            answer=answer_in_words("solved"),
            boards=False,
        )
    assert capture.get().splitlines()[:4] == [
        "prompt      7 3 -> 4",
        "answer for --loss nll 7+3",
        "completion  7+3   wrong   1 of 2",
        "completion  7-3   right   1 of 2",
    ]


def render(truth: str, text: str, **options: bool) -> str:
    console = Console(width=100, **options)  # type: ignore[arg-type]
    with console.capture() as capture:
        console.print(boards.side_by_side(truth, text))
    return capture.get()


def test_wrong_squares_are_marked_on_both_boards_with_and_without_colour() -> None:
    truth, text = (
        "8/8/8/8/4P3/8/8/K6k b - e3 0 1+0.001+0+0",
        "8/8/8/8/3P4/8/8/K6k b - d3 0 2+0.001+0",
    )
    plain = render(truth, text)
    (line,) = [line for line in plain.splitlines() if line.startswith("4 ")]
    assert " ".join(line.split()) == "4 . . . [.][P] . . . 4 . . . [P][.] . . ."
    assert plain.count("[") == 4
    assert "\x1b[1;37;41m[P]" in render(truth, text, force_terminal=True)
    assert "[" not in render(truth, truth)
    assert boards.differences(truth, text) == [
        "2 squares",
        "en passant 'd3' instead of 'e3'",
        "move number '2' instead of '1'",
        "truncated '' instead of '0'",
    ]
    assert boards.differences(truth, truth) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["64 squares", "not 8 ranks but 1", "side to move '' instead of 'b'"]),
        ("8/8/8/8/4P3/8/8/K6k1 b - e3 0 1+0.001+0+0", ["rank 1 is 9 wide"]),
        ("8/8/8/8/4P3/8/8/K6k/8 b - e3 0 1+0.001+0+0", ["not 8 ranks but 9"]),
        ("8/8/8/8/4P3/8/8/K51k b - e3 0 1+0.001+0+0", ["how the board is written"]),
        (
            "8/8/8/8/4P3/8/8/K6k b - e3 0 1+0.001+0+0+\x1b[2J+1+2",
            ["beyond that '\\x1b[2J+1+2' instead of ''"],
        ),
        ("\N{BLACK CHESS PAWN}/²/" * 40, ["squares"]),
    ],
)
def test_any_text_has_a_board_and_a_description(text: str, words: list[str]) -> None:
    truth = "8/8/8/8/4P3/8/8/K6k b - e3 0 1+0.001+0+0"
    assert all(len(row) == 8 for row in boards.squares(text)) and len(boards.squares(text)) == 8
    found = "; ".join(boards.differences(truth, text))
    for word in words:
        assert word in found
    assert "\x1b" not in sample.plain(text)


# --- evaluate -------------------------------------------------------------------------------------


def test_evaluate_has_the_numbers_of_the_evaluation_in_training_by_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_json = tmp_path / "made" / "out.json"
    rewards = tmp_path / "mine.py"
    rewards.write_text("""
from minigrpo import reward

@reward()
def length(example, text):
    return len(text) / 1000
""")
    words = ("--n", 40, "--seed", 3, "--eval-samples", 2, "--rewards", rewards)
    call(evaluate, "shipped", *words, "--json", out_json)
    result = json.loads(out_json.read_text())
    loaded = load(ModelSelection(Path("shipped"), seed=3), Screen(quiet=True))
    trainer = Trainer(
        Config.of(
            **{**TINY, "init_from": "shipped", "out_dir": str(tmp_path / "run")},
            rewards=str(rewards),
        ),
        quiet=True,
    )
    task, scorer = loaded.task, trainer.scorer
    expected = evaluate_in_training(loaded.sampler, task, scorer, size=40, seed=3, samples=2)
    everything, kinds = result["kinds"]["all"], result["kinds"].keys() - {"all"}
    assert {"pass@1", "pass@2", "length", "length_sampled", "valid_sampled"} <= everything.keys()
    for name in everything.keys() - {"n", "reward", "reward_sampled"}:  # of other weights
        assert everything[name]["value"] == pytest.approx(expected[name])
    assert 0 < everything["exact"]["value"] < 1 and everything["n"] == 40
    assert kinds == {name.removeprefix("count/") for name in expected if name.startswith("count/")}
    for kind in kinds:
        assert result["kinds"][kind]["n"] == expected[f"count/{kind}"]
        assert result["kinds"][kind]["exact"]["value"] == pytest.approx(expected[f"exact/{kind}"])
    out = capsys.readouterr().out
    assert "40 held-out examples, seed 3" in out and "Wilson" in out and "quiet" in out
    assert "pass@2 " in out and "length " in out


# --- export ---------------------------------------------------------------------------------------


def test_an_export_of_a_run_is_a_model_like_any_other(run: Path, tmp_path: Path) -> None:
    call(export, run, "--out", tmp_path / "new" / "model")
    exported = Transformer.from_pretrained(tmp_path / "new" / "model")
    ids = torch.arange(30)[None]
    assert torch.equal(exported.logits(ids), Transformer.from_pretrained(run).logits(ids))
    config = json.loads((tmp_path / "new" / "model" / "config.json").read_text())
    assert (config["n_head"], config["n_positions"], config["eos_token_id"]) == (2, 160, 359)


QWEN = ModelShape(
    vocab_size=352,  # padded, as published
    context=64,
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    **QWEN2,
)


def run_of_a_qwen(tmp_path: Path, **options: Any) -> tuple[Path, Tokenizer]:
    """A run from a folder of a Qwen2-shaped chat model, and the model's own tokenizer."""
    folder = chat_files(tmp_path / "qwen", "qwen3", add_bos_token=False)
    tokenizer = load_tokenizer(str(folder))
    export_model(Transformer(QWEN, seed=2).state_dict(), folder, shape=QWEN, eos=tokenizer.eot)
    ends = {"eos_token_id": [tokenizer.eot, tokenizer.special["<|endoftext|>"]]}
    published = {**ends, "temperature": 0.7, "bos_token_id": tokenizer.special["<|endoftext|>"]}
    (folder / "generation_config.json").write_text(json.dumps(published))
    load_tokenizer.cache_clear()
    config = {name: x for name, x in TINY.items() if name not in ("layers", "width", "heads")}
    config |= {"init_from": str(folder), "tokenizer": str(folder), "data": SUMS, "max_steps": 1}
    config |= {"eval_every": 0, "eval_size": 1, "out_dir": str(tmp_path / "run"), **options}
    Trainer(Config.of(**config), quiet=True).fit()
    return tmp_path / "run", load_tokenizer(str(folder))


def test_an_export_has_the_tokenizer_of_its_run_and_all_tokens_that_end_a_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, tokenizer = run_of_a_qwen(tmp_path)
    out = tmp_path / "out"
    call(export, run, "--out", out)
    back = load_tokenizer(str(out))
    assert back.fingerprint == tokenizer.fingerprint and back.chat
    assert len(tokenizer.stops) == 2 and tokenizer.eot < tokenizer.n_vocab - 1 < QWEN.vocab_size
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == tokenizer.eot
    generation = json.loads((out / "generation_config.json").read_text())
    first, *others = generation["eos_token_id"]
    assert first == tokenizer.eot and {first, *others} == tokenizer.stops
    assert generation["temperature"] == 0.7  # what the model came with stays
    # a folder's own tokenizer is used, and another one only if it fits
    call(export, out / "model.safetensors", "--out", tmp_path / "again")
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    call(export, run / "model.safetensors", "--out", tmp_path / "of-file")
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "of-file").iterdir()}
    own = Path(shutil.copyfile(run / "model.safetensors", tmp_path / "own.safetensors"))
    call(export, own, "--out", tmp_path / "named", "--tokenizer", out)
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "named").iterdir()}
    capsys.readouterr()
    call(export, own, "--out", tmp_path / "unknown")
    assert "the last token is taken for the end of a text; --tok" in capsys.readouterr().err


def test_an_export_of_a_model_without_a_tokenizer_keeps_its_ends(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(export, run, "--out", tmp_path / "chess")
    (tmp_path / "chess" / "generation_config.json").unlink()
    config = tmp_path / "chess" / "config.json"
    config.write_text(config.read_text().replace('"eos_token_id": 359', '"eos_token_id": [7, 9]'))
    call(export, tmp_path / "chess", "--out", tmp_path / "out")
    ends = [json.loads((tmp_path / "out" / f"{name}.json").read_text())["eos_token_id"] for name in
            ("config", "generation_config")]  # fmt: skip
    assert ends == [7, [7, 9]]
    capsys.readouterr()
    bpe.write_folder(tmp_path / "small", bpe.tokenizer_json([], "qwen"))
    with pytest.raises(SystemExit):
        call(export, run, "--out", tmp_path / "b", "--tokenizer", tmp_path / "small")
    said = capsys.readouterr().err
    assert "error: --tokenizer " in said and "was trained with another vocabulary" in said
    assert not (tmp_path / "b").exists()


@pytest.mark.peer
def test_an_exported_run_writes_the_same_greedy_text_in_transformers(tmp_path: Path) -> None:
    import transformers

    run, tokenizer = run_of_a_qwen(tmp_path, max_steps=3)
    out = tmp_path / "out"
    call(export, run, "--out", out)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert set(theirs.generation_config.eos_token_id) == tokenizer.stops
    loaded = load(ModelSelection(run, max_new_tokens=24), Screen(quiet=True))
    examples = [loaded.task.held_out(i) for i in range(4)]
    parts = sample.complete(loaded, examples, 0)
    ours = [group for part in parts for group in decode(loaded.sampler.tokenizer, part)]
    for example, (text,) in zip(examples, ours, strict=True):
        ids = their_tokenizer(example.prompt, return_tensors="pt")
        found = theirs.generate(**ids, do_sample=False, max_new_tokens=24)
        new = found[0, ids["input_ids"].shape[1] :]
        assert their_tokenizer.decode(new, skip_special_tokens=True) == text
        assert len(text) > 4
    messages = [{"role": "user", "content": "2+2="}]
    rendered = their_tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.chat and rendered == tokenizer.chat.render(messages)


@pytest.mark.parametrize("argv", [["nowhere"], [__file__]])
def test_what_cannot_be_exported_is_one_line(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        call(export, *argv, "--out", tmp_path / "out")
    assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_curves_of_two_runs_their_difference_and_what_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    for name, shares in (("a", [0.25, 0.5, 0.75]), ("b", [0.25, 0.4])):
        (tmp_path / name).mkdir()
        lines = [
            json.dumps({"step": 10 * i, "n": 8.0, "exact": share}) for i, share in enumerate(shares)
        ]
        (tmp_path / name / "eval.jsonl").write_text("\n".join(lines) + "\n")
    drawn = list[Figure]()
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path, **_: drawn.append(figure) or path.touch()
    )
    runs = tmp_path / "a", tmp_path / "b"
    call(curves, *runs, "--out", tmp_path / "c.png", "--difference", "--metric", "exact")
    assert "+50.0" in capsys.readouterr().out
    curve, apart = drawn[0].axes
    assert [line.get_ydata()[-1] for line in curve.lines[::2]] == [
        75,
        40,
    ]  # a line and its ends, each
    assert [list(line.get_ydata()) for line in apart.lines] == [[0, 0, 0], [0, pytest.approx(-10)]]
    for arguments, words in (
        ([tmp_path], "no eval.jsonl in this folder"),
        ([*runs, "--out", "c.gif"], "--out must end with"),
        ([*runs, "--out", "c.png"], "--metric exact_sampled: "),
    ):
        with pytest.raises(SystemExit):
            call(curves, *arguments)
        assert words in " ".join(capsys.readouterr().err.split())


def test_pooled_curves_are_means_of_the_runs_that_differ_in_their_last_number() -> None:
    runs = {
        Path("GRPO-0"): [{"step": 0, "exact": 0.25}, {"step": 9, "exact": 0.5}],
        Path("GRPO-1"): [{"step": 0, "exact": 0.75}],
        Path("nll-0"): [{"step": 0, "exact": 0.0}],
    }
    lines = curves.pooled(runs)
    assert {name: len(records) for name, records in lines.items()} == {"GRPO": 2, "nll": 1}
    assert curves.points(lines["GRPO"], "exact") == {0: [25.0, 75.0]}  # not where one has ended
