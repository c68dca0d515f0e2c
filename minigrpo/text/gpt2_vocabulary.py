"""GPT-2's vocabulary: tiktoken fetches its two files, and the `tokenizers` package runs them."""

import json
from typing import Any

import tokenizers
from tiktoken.load import read_file_cached
from tokenizers import decoders, models, pre_tokenizers

from ..errors import refusing

GPT2 = "gpt2"
END_OF_TEXT = "<|endoftext|>"
FOLDER = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
IDS_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


def gpt2_engine() -> tokenizers.Tokenizer:
    """GPT-2's tokenizer. Raises ConfigError if its vocabulary is neither stored nor fetched."""
    with refusing("GPT-2's vocabulary cannot be fetched"):
        ids = read_file_cached(f"{FOLDER}/encoder.json", IDS_SHA256)
        merges = read_file_cached(f"{FOLDER}/vocab.bpe", MERGES_SHA256)
    pairs: list[Any] = [tuple(line.split()) for line in merges.decode().splitlines()[1:]]
    engine = tokenizers.Tokenizer(models.BPE(vocab=json.loads(ids), merges=pairs))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # GPT-2's pattern
    engine.decoder = decoders.ByteLevel()
    engine.add_special_tokens([END_OF_TEXT])
    return engine
