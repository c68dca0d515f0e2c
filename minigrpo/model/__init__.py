"""The model: tokenizers, the transformer on packed tokens, packing, log-probs, weights files.

`transformer` is the model, `packing` decides which tokens it runs in training (`packing_rows` and
`packed_attention` are its parts), `logprobs` is the output head. `tokenizer` and `encoding` turn
texts into tokens, `chat` messages into prompts; `weights` and `pretrained` read and write files.
Nothing here knows the config.
"""
