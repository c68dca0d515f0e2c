"""Models by their name on the Hugging Face Hub, with a made-up cache and a made-up package."""

import builtins
import errno
import sys
import threading
import time
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from minigrpo import Config, Trainer, Transformer
from minigrpo.model.hub import REASONS, HubModel, cache_folder, cached_folder, local_folder
from minigrpo.model.shape import ModelShape
from minigrpo.model.tokenizer import load_tokenizer
from minigrpo.model.weights import export_model
from minigrpo.runtime.checkpoint import load_checkpoint
from minigrpo.runtime.distributed import DistContext
from minigrpo.runtime.flags import ConfigError
from minigrpo.runtime.logging import Screen
from minigrpo.runtime.origins import fetch_models
from minigrpo.tools import evaluate, export, plan, sample, train
from minigrpo.tools.loading import ModelSelection, load

from . import bpe
from .chat_model import QWEN2
from .gradients import TINY
from .killing import SUMS

FOUND = bpe.tokenizer_json([], "qwen")  # bytes and three special tokens
SHAPE = ModelShape(259, context=40, layers=1, width=16, heads=4, kv_heads=2, **QWEN2)
NAME = "org-1/Model_2.5"
OLD, NEW = "0a" * 20, "1b" * 20  # commits
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with an empty cache in `hub`, without the package and its variables."""
    for name in (*VARIABLES, "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # importing it fails
    monkeypatch.chdir(tmp_path)
    load_tokenizer.cache_clear()
    return tmp_path


def write_model(folder: Path, seed: int = 0, *, shards: bool = False, **files: Any) -> Path:
    """A model's folder, with its tokenizer; in shards, with what else lies in published ones."""
    model = Transformer(SHAPE, seed=seed)
    export_model(model.state_dict(), folder, shape=SHAPE, eos=258)
    if shards:
        from safetensors.torch import load_file, save_file

        state = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(state)
        index = {"weight_map": {name: SHARDS[i % 2] for i, name in enumerate(names)}}
        files["model.safetensors.index"] = index
        for i, shard in enumerate(SHARDS):
            save_file({name: state[name] for name in names[i::2]}, folder / shard)
        for name in ("pytorch_model-00001-of-00001.bin", "model.gguf", "README.md"):
            (folder / name).write_bytes(b"not needed")
        for name in ("original/consolidated.00.pth", "onnx/model.onnx", "onnx/config.json"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"not needed")
    return bpe.write_folder(folder, FOUND, tokenizer_config={"eos_token": "<|im_end|>"}, **files)


def put(
    source: Path, files: list[str] | None = None, *, commit: str = OLD, ref: str = "main"
) -> Path:
    """Put files into the cache as the Hub's package lays them out: links to blobs."""
    repository = cache_folder() / f"models--{NAME.replace('/', '--')}"
    for file in source.rglob("*"):
        name = str(file.relative_to(source))
        if file.is_dir() or (files is not None and not any(fnmatch(name, p) for p in files)):
            continue
        blob = repository / "blobs" / f"{commit}-{name.replace('/', '-')}"
        link = repository / "snapshots" / commit / name
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(file.read_bytes())
        link.unlink(missing_ok=True)
        link.symlink_to(blob)
    (repository / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    return repository / "snapshots" / commit


class Package(ModuleType):
    """huggingface_hub, whose Hub has one model."""

    seconds = 0.0  # that a download takes

    def __init__(self, source: Path, error: Exception | None = None) -> None:
        super().__init__("huggingface_hub")
        self.source, self.error = source, error
        self.calls: list[tuple[str, list[str]]] = []  # revision and patterns

    def snapshot_download(
        self, repo_id: str, *, revision: str, allow_patterns: list[str], cache_dir: Path
    ) -> str:
        assert repo_id == NAME and cache_dir == cache_folder()
        self.calls.append((revision, allow_patterns))
        time.sleep(self.seconds)
        if self.error:
            raise self.error
        return str(put(self.source, allow_patterns))


def install(monkeypatch: pytest.MonkeyPatch, package: Package) -> Package:
    monkeypatch.setitem(sys.modules, "huggingface_hub", package)
    return package


def error_of(name: str = NAME, **options: bool) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the caller looks at it
        local_folder(name, **options)
    text = str(error.value)
    assert "\n" not in text and text.startswith(f"{name}: ")
    return text.removeprefix(f"{name}: ")


# --- names and the cache --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "~/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x", "HF_HOME": "/h"}, "/h/hub"),
        ({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/g"}, "/g"),
        ({"HF_HUB_CACHE": "~/c/$XDG_CACHE_HOME", "HUGGINGFACE_HUB_CACHE": "/g"}, "~/c/$"),
    ],
)
def test_the_cache_is_where_the_hubs_own_package_keeps_it(
    here: Path, values: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    if expected.endswith("$"):
        monkeypatch.setenv("XDG_CACHE_HOME", "deep")
        expected = expected.replace("$", "deep")
    assert cache_folder() == Path(expected).expanduser()


def test_a_copy_in_the_cache_is_found_by_branch_tag_and_commit(here: Path) -> None:
    source = write_model(here / "source", shards=True)
    folder, tagged = put(source), put(source, commit=NEW, ref="v1.0")
    pull = put(source, commit="2c" * 20, ref="refs/pr/7")
    assert local_folder(NAME) == local_folder(f"{NAME}@main") == folder
    assert local_folder(f"{NAME}@v1.0") == local_folder(f"{NAME}@{NEW}") == tagged
    assert local_folder(f"{NAME}@refs/pr/7") == pull
    assert cached_folder(NAME) == folder and cached_folder("org/other") is None
    (here / "org-1" / "Model_2.5").mkdir(parents=True)  # a path that exists counts before that
    assert local_folder(NAME) == Path(NAME) and cached_folder(NAME) is None


@pytest.mark.parametrize(
    "name",
    [
        *(
            "shipped",
            "a/b/c",
            "/a/b",
            "./a/b",
            "../a",
            "~/a",
            "a/..",
            "a/b/",
            "",
            "a b/c",
            "a/b@",
            "ä/b",
        ),
        *("a/model.safetensors", "a/b.tiktoken", "a/b@../c", "a--b/c", "a/b\0", "a/" + "b" * 97),
    ],
)
def test_what_has_another_form_is_a_path(here: Path, name: str) -> None:
    assert HubModel.of(name) is None and local_folder(name) == Path(name)


def test_what_begins_as_a_path_is_a_path_for_every_flag_and_tool(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Although the Hub has a model of that name."""
    put(write_model(here / "source"))
    before, name = [*here.iterdir()], f"./{NAME}"
    for tool, argv in (
        (train, ["--init-from", name]),
        (train, ["--tokenizer", name]),
        (plan, ["--init-from", name]),
        (export, [name, "--out", "out"]),
        (export, ["shipped", "--tokenizer", name, "--out", "out"]),
        (evaluate, [name]),
        (sample, [name, "--prompt", "a"]),
        (sample, ["./shipped", "--prompt", "a"]),
    ):
        with pytest.raises(SystemExit) as stop:
            tool.main(argv)
        said = capsys.readouterr().err
        assert stop.value.code == 2 and said.count("\n") == 1, said
        assert str(Path(argv[0])) in said or str(Path(name)) in said
        assert "no" in said and "Hugging Face" not in said
    assert [*here.iterdir()] == before


def test_a_folder_that_is_named_with_its_dot_is_read(here: Path) -> None:
    put(write_model(here / "source"))
    write_model(here / NAME, seed=1)
    expected = Transformer.from_pretrained(here / NAME).wte.weight
    for name in (f"./{NAME}", NAME):  # a path that exists counts before the Hub
        selection = ModelSelection(name, data=SUMS, max_new_tokens=8)
        loaded = load(selection, Screen(quiet=True))
        assert loaded.name == name and torch.equal(loaded.sampler.model.wte.weight, expected)


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", *SHARDS])
def test_a_copy_that_is_not_whole_is_refused_and_says_what_to_type(here: Path, lost: str) -> None:
    folder = put(write_model(here / "source", shards=True))
    (folder / lost).resolve().unlink()  # as a download that was interrupted leaves it
    text = error_of()
    assert f"its copy in the Hugging Face cache, {folder}, lacks {lost}" in text
    assert text.endswith(
        f"type `hf download {NAME}`, or `pip install 'minigrpo[hub]'` to have it fetched"
    )
    assert ("give that folder itself if the model has none" in text) == (lost == "tokenizer.json")


def test_without_a_copy_and_without_the_package_it_says_what_to_type(here: Path) -> None:
    text = error_of()
    assert text.startswith(
        f"no such file or folder, and no such model in the Hugging Face cache {here}"
    )
    assert f"type `hf download {NAME}`, or `pip install 'minigrpo[hub]'`" in text
    assert f"type `hf download {NAME} --revision v2`" in error_of(f"{NAME}@v2")


def test_a_tokenizer_alone_needs_no_weights(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(here / "source", shards=True)
    folder = put(source, ["tokenizer*"])
    assert local_folder(NAME, weights=False) == folder
    assert load_tokenizer(NAME).encode("ab") == load_tokenizer(str(source)).encode("ab")
    assert load_tokenizer(NAME).source == folder and load_tokenizer(NAME).name == NAME
    load_tokenizer.cache_clear()
    (folder / "tokenizer.json").resolve().unlink()
    with pytest.raises(ValueError, match=f"^--tokenizer {NAME}: its copy .* lacks tokenizer.json"):
        load_tokenizer(NAME)
    package = install(monkeypatch, Package(source))
    assert load_tokenizer(NAME).encode("ab") == [97, 98]
    assert [revision for revision, _ in package.calls] == ["main"]
    assert not list(folder.glob("*.safetensors"))


# --- fetching -------------------------------------------------------------------------------------


def test_only_the_files_that_are_needed_are_fetched_and_once(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(here / "source", shards=True)
    package = install(monkeypatch, Package(source))
    folder = local_folder(NAME)
    index = "model.safetensors.index.json"
    assert sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    ) == [*("config.json", *SHARDS, index, "tokenizer.json", "tokenizer_config.json")]
    # the weights are those of the commit that the settings are from
    assert [revision for revision, _ in package.calls] == ["main", OLD]
    assert local_folder(NAME) == folder and len(package.calls) == 2
    (source / SHARDS[0]).unlink()
    (folder / SHARDS[0]).unlink()
    assert f"has no {SHARDS[0]} on the Hugging Face Hub" in error_of()
    (source / "config.json").unlink()
    (folder / "config.json").unlink()
    package.calls.clear()
    assert error_of().startswith("has no config.json on the Hugging Face Hub")
    assert len(package.calls) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3_moe"}, "a mixture of experts"),
        ({"model_type": "qwen2", "quantization_config": {"bits": 4}}, "is quantised"),
    ],
    ids=["family", "quantised"],
)
def test_a_model_that_is_refused_costs_no_gigabytes(
    here: Path, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(monkeypatch, Package(write_model(here / "source", config=changes)))
    assert words in error_of()
    assert len(package.calls) == 1 and not list(cache_folder().rglob("*.safetensors"))


def test_pickled_weights_are_not_fetched_and_said_how_to_convert(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(here / "source")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    install(monkeypatch, Package(source))
    text = error_of()
    assert "has no model.safetensors" in text and "save_pretrained(" in text
    assert not list(cache_folder().rglob("*.bin"))


class RepositoryNotFoundError(OSError): ...


class GatedRepoError(RepositoryNotFoundError): ...


class RevisionNotFoundError(OSError): ...


class LocalEntryNotFoundError(FileNotFoundError): ...


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError("403 Client Error.\nCannot access"), "its owner must allow it: ask"),
        (RepositoryNotFoundError("401 Client\nError"), "the Hugging Face Hub has no such model"),
        (RevisionNotFoundError("404"), "it has no such revision"),
        (LocalEntryNotFoundError("An error\nhappened"), "the Hugging Face Hub cannot be reached"),
        (ConnectionResetError("reset"), "the Hugging Face Hub cannot be reached"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device: /"),
        (
            RuntimeError("Data processing error:\nNo space"),
            "RuntimeError: Data processing error: No",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_the_hub_refuses_is_one_line(
    here: Path,
    error: Exception,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(monkeypatch, Package(here, error))
    assert f"it cannot be fetched: {words}" in error_of()
    with pytest.raises(SystemExit) as stop:
        train.main(["--init-from", NAME])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1
    assert said.startswith(f"error: --init-from {NAME}: no such file or folder") and words in said
    assert not (here / "runs").exists()


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_nothing_is_fetched_offline(
    here: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(monkeypatch, Package(write_model(here / "source")))
    monkeypatch.setenv(variable, "yes")
    assert f"HF_HUB_OFFLINE is set, so it is not fetched; type `hf download {NAME}`" in error_of()
    assert not package.calls
    monkeypatch.setenv(variable, "0")
    assert local_folder(NAME).name == OLD


def test_of_several_processes_the_main_one_fetches(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Hub that refuses is asked once, and every process says why."""
    package = install(monkeypatch, Package(here, GatedRepoError("403")))
    package.seconds = 0.1
    config, store = Config.of(init_from=NAME, tokenizer=NAME), HashStore()
    errors: dict[int, str] = {}

    def start(rank: int) -> None:
        try:
            Trainer(config, dist=DistContext(rank, 0, 2, store), quiet=True)
        except ConfigError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors[0] == errors[1] and errors[0].startswith(f"--init-from {NAME}: ")
    assert len(package.calls) == 1
    package.source, package.error = write_model(here / "source"), None
    fetch_models(config)
    # settings and tokenizer, then the weights
    assert [revision for revision, _ in package.calls[1:]] == ["main", OLD]


# --- runs and tools -------------------------------------------------------------------------------


def test_a_run_keeps_the_name_and_notices_another_commit(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = put(write_model(here / "source"))
    options = {**TINY, "init_from": NAME, "tokenizer": NAME, "data": SUMS, "max_steps": 2}
    for name in ("layers", "width", "heads"):
        del options[name]

    def trainer(**changes: Any) -> Trainer:
        config = Config.of(**{**options, "out_dir": "run", "eval_every": 0, **changes})
        return Trainer(config, quiet=True)

    first = trainer()
    expected = Transformer.from_pretrained(folder).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in first.model.state_dict().items())
    first.fit()
    assert f'init_from = "{NAME}"' in (here / "run" / "config.toml").read_text()
    state = load_checkpoint(here / "run" / "checkpoints" / "step_000002")
    assert state["files"][f"--init-from {NAME}"] == OLD

    trainer(resume="auto").run_dir.close()
    assert "other contents" not in capfd.readouterr().err
    put(write_model(here / "other", seed=1), commit=NEW)
    trainer(resume="auto").run_dir.close()
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and f"--init-from {NAME}, --tokenizer {NAME}: other" in said


def test_tools_take_a_name(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = put(write_model(here / "source"))
    selection = ModelSelection(NAME, tokenizer=NAME, data=SUMS, max_new_tokens=8)
    loaded = load(selection, Screen(quiet=True))
    assert loaded.name == NAME
    expected = Transformer.from_pretrained(folder).wte.weight
    assert torch.equal(loaded.sampler.model.wte.weight, expected)
    with pytest.raises(SystemExit):
        export.main([NAME, "--out", str(folder)])
    assert "is the model to export; take another folder" in capsys.readouterr().err
    export.main([NAME, "--out", "out"])
    assert load_tokenizer("out").fingerprint == load_tokenizer(NAME).fingerprint


# --- against huggingface_hub ----------------------------------------------------------------------


@pytest.mark.peer
def test_the_package_finds_the_same_folders_and_knows_these_errors(here: Path) -> None:
    del sys.modules["huggingface_hub"]
    import huggingface_hub
    from huggingface_hub import errors

    put(write_model(here / "source"))
    put(here / "source", commit=NEW, ref="v1.0")
    for revision in ("main", "v1.0", NEW):
        theirs = huggingface_hub.snapshot_download(
            NAME, revision=revision, cache_dir=cache_folder(), local_files_only=True
        )
        assert local_folder(f"{NAME}@{revision}") == Path(theirs)
    for name in REASONS.keys() - dir(builtins):
        assert issubclass(getattr(errors, name), Exception)
