"""What --model, --reference, --teacher and rewards name: a model, whose weights are read on use.

The first table of docs/models.md has the forms of a name.
A look-up reads small files. `load` and `start` alone read weights, or fetch them from the Hub.
"""

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import CHECKPOINTS, checkpoints, load_checkpoint, newest
from ..errors import ConfigError, refusing
from ..hub import CONFIG, fetch, read_json, settings_folder
from ..identity import record_checksum
from ..rng import stream
from ..settings import FROM_PYTHON, INITIAL, SCRATCH, SHIPPED, ModelConfig, Settings
from ..text.tokenizer import TOKENIZER, Tokenizer, load_tokenizer
from ..types import Warn
from . import hf, lora
from .config_json import SHAPES, read_shape
from .shape import ModelShape, Size
from .transformer import Transformer

ASSETS = Path(__file__).parents[1] / "assets"
RECORD = "config.toml"  # the settings of a run, in its folder


@dataclass(frozen=True)
class RunRecord:
    settings: Settings
    versions: dict[str, Any]  # of software, and digests of files and weights: see `record_checksum`

    @classmethod
    def read(cls, folder: Path) -> "RunRecord | None":
        """The record in a folder, or None if it is not the folder of a run."""
        file = folder / RECORD
        if not file.is_file():
            return None
        with refusing(file):
            tables = tomllib.loads(file.read_text("utf-8"))
            versions = tables.pop("versions", {})
            return cls(Settings.model_validate(tables), versions)


@dataclass(frozen=True)
class ModelSource:
    """A model by its name. No weights are read before they are asked for."""

    name: str
    folder: Path | None = None  # its folder, or its file; None for `shipped` and `scratch`
    commit: str | None = None  # of a model on the Hub, whose weights may not be in the folder yet
    record: RunRecord | None = None  # of the run whose folder it is, or whose folder has the file
    base: "ModelSource | None" = None  # the model under the adapters in the folder

    @classmethod
    def of(cls, name: str) -> "ModelSource":
        if name in (SHIPPED, SCRATCH):
            return cls(name)
        folder = settings_folder(name)
        record = RunRecord.read(folder.parent if folder.is_file() else folder)
        base = None
        if folder.is_dir():
            # the record of a run says more than what it wrote for PEFT
            run = record.settings if record else None
            under = run.model.name if run and run.model.lora_rank else hf.base_of(folder)
            base = cls.of(under) if under else None
        commit = folder.name if folder != Path(name) else None
        return cls(name, folder, commit, record, base)

    @property
    def pinned(self) -> str:
        """The name, with the commit of a model on the Hub."""
        return f"{self.name.partition('@')[0]}@{self.commit}" if self.commit else self.name

    @property
    def is_run(self) -> bool:
        """Whether it is the folder of a run, and not one of the files in it."""
        return self.record is not None and self.path.is_dir()

    @property
    def is_random(self) -> bool:
        """Whether it is a folder with the shape alone."""
        return not self.commit and self.path.is_dir() and not any(self.path.glob("*.safetensors"))

    @property
    def path(self) -> Path:
        """The folder or file. Raises ConfigError for a model that has none."""
        if self.name == SHIPPED:
            return ASSETS / "chess.safetensors"
        if self.folder is None or self.name.startswith(FROM_PYTHON):
            raise ConfigError(f"{self.name}: has no files; give a folder, a file or ORG/NAME")
        return self.folder

    @cached_property
    def shape(self) -> ModelShape:
        """The shape, without reading weights. Raises ConfigError."""
        return self.base.shape if self.base else hf.read_model_shape(self.path)

    @property
    def size(self) -> Size | None:
        """The size of a published model; None if it ships, is random, or is a run of such a one."""
        if self.folder is None:
            return None
        began_from = self.record and self.record.settings.model.name
        if began_from and not began_from.startswith(FROM_PYTHON):
            return ModelSource.of(began_from).size
        if self.base:
            return self.base.size
        if self.is_random:
            return None
        with refusing(f"--model {self.name}"):
            self.path.stat()  # an error if it does not exist: defaults would fit another size
            return Size.of(Transformer(self.shape, seed=None))

    @property
    def tokenizer_settings(self) -> dict[str, Any]:
        """The settings that the model brings: `tokenizer`, and of a run its template with args."""
        if self.record:
            names = {"tokenizer", "chat_template", "chat_args"}
            return self.record.settings.model.model_dump(include=names)
        if self.folder and (self.folder / TOKENIZER).is_file():
            return {"tokenizer": self.name}
        return self.base.tokenizer_settings if self.base else {"tokenizer": "chess"}

    def load_tokenizer(self) -> Tokenizer:
        settings = self.tokenizer_settings
        return load_tokenizer(settings.pop("tokenizer"), **settings)

    def load(self, matrix_dtype: str, seed: int, say: Warn) -> Transformer:
        """The model on the CPU, with adapters merged; `Weights.store` explains `matrix_dtype`."""
        if self.is_run:
            model = self.load_trained(say)
        elif self.base:
            model = self.base.load("float32", seed, say)
            lora.attach_peft(model, self.fetch_weights())
            say(f"{self.name}: its adapters are merged into {self.base.name}")
        else:
            if self.folder and self.is_random:
                say(f"{self.name}: random weights, of the shape in its config.json")
            return Transformer.from_pretrained(self.fetch_weights(), matrix_dtype, seed=seed)
        lora.merge_adapters(model, matrix_dtype).store(matrix_dtype)
        return model

    def load_trained(self, say: Warn) -> Transformer:
        """The model of a run as it was trained: its adapters are beside their base."""
        assert self.record
        folder = self.path
        state = None
        if checkpoints(folder / CHECKPOINTS):
            state = load_checkpoint(newest(folder, say))
            say(f"{folder}: the weights of step {state['step']}")
        if self.base:
            run = self.record.settings
            model = self.base.start(run, self.load_tokenizer(), say, self.record.versions)
            if state is None:
                lora.load_peft(model, folder)
            else:
                lora.load_trained_state(model, state["model"])
        elif state is None:
            model = Transformer.from_pretrained(folder / hf.WEIGHTS)
        else:
            model = Transformer(SHAPES.validate_python(state["run"]["shape"]), seed=None)
            model.load_state_dict(state["model"], assign=True)
        return model

    def start(
        self,
        config: Settings,
        tokenizer: Tokenizer,
        say: Warn,
        checksums: dict[str, str],
        given: Transformer | None = None,
    ) -> Transformer:
        """The model that a run or a command begins with, on the CPU, with adapters of --lora-rank.

        `checksums` gets one for the weights that a resume loads again. `given` is the caller's
        model, which is changed in place.
        """
        settings = config.model
        seed = config.run.seed
        label = f"--model {self.name}"
        under = self.under_adapters(settings)
        # 1. The weights, without adapters.
        if given is None and self.name == SCRATCH:
            given = Transformer(ModelShape(tokenizer.n_vocab), seed)
        if given is None:
            model = under.load(settings.matrix_dtype, seed, say)
        else:
            model = given
            if lora.adapters(model):
                lora.merge_adapters(model, settings.matrix_dtype)
            model.store(settings.matrix_dtype)
        fit_vocab(model, label, tokenizer)
        # 2. The adapters.
        if under is self:
            drawn = int(stream(seed, "adapters").integers(2**32))
            lora.add_adapters(
                model, settings.lora_rank, settings.lora_alpha, settings.lora_targets, drawn
            )
        else:
            lora.attach_peft(model, self.fetch_weights())
        # 3. A checkpoint has what is trained. A resume loads the rest again, or, if a frozen model
        # is a copy of the start, all of it. Random numbers may differ in their last bits. Those of
        # new adapters do not count: without training, adapters add nothing.
        draws_adapters = under is self and settings.lora_rank > 0
        has_copy = INITIAL in (config.loss.teacher, config.loss.reference_model)
        copies_start = has_copy and not draws_adapters
        parameters: dict[str, torch.Tensor] = {
            name: parameter
            for name, parameter in model.named_parameters()
            if copies_start or not parameter.requires_grad
        }
        for name, layer in lora.adapters(model).items():
            parameters[f"{name}.scale"] = torch.tensor(layer.scale)
        if parameters and self.name != SCRATCH:
            record_checksum(checksums, label, parameters)
        return model

    def under_adapters(self, settings: ModelConfig) -> "ModelSource":
        """The model to load before adapters are added: the base, or this one with PEFT's merged.

        PEFT's adapters are trained on if --lora-rank is theirs and the only setting of LoRA.
        """
        asks_for_others = settings.lora_alpha or settings.lora_targets
        if self.base is None or self.is_run or settings.lora_rank == 0 or asks_for_others:
            return self
        has_their_rank = settings.lora_rank == hf.AdapterSettings.read(self.path).r
        return self.base if has_their_rank else self

    def fetch_weights(self) -> Path:
        """The folder or file with its weights, which are fetched if it is on the Hub."""
        path = self.path
        if self.commit is None:
            return path
        if self.base:
            fetch(self.name, hf.ADAPTER_FILE, self.commit)
        else:
            read_shape(read_json(path / CONFIG))  # a model that is refused costs no gigabytes
            fetch(self.name, "model*.safetensors", self.commit)
            if not hf.weight_files(path / hf.WEIGHTS):
                raise ConfigError(f"{self.name}: has no safetensors, or they are not here")
        return path


def fit_vocab(model: Transformer, name: str, tokenizer: Tokenizer) -> None:
    """Drop vocabulary padding: what cannot be decoded must never be sampled. Raises ConfigError.

    Special tokens at the end may have no row, as Gemma's for images.
    """
    size = model.shape.vocab_size
    known = tokenizer.n_vocab
    if known < size <= known * 9 / 8:  # published ones are padded to a round number
        model.trim_vocab(known)
    elif size > known or not {*range(size, known)} <= {*tokenizer.special.values()}:
        raise ConfigError(f"{name} has {size} tokens, --tokenizer {tokenizer.name} has {known}")
