"""Decoding: from prompts to sampled completions.

`sampler` is what the trainer calls. `generate` is the loop, in which waiting prompts enter as
completions end. `running` holds the state of the completions, `params` picks tokens, and `slots`
gives completions their places in the decoder. For speculative decoding, `proposer` proposes tokens
from the texts of `drafts`, with the tables of `contexts`. The model runs in one of the `decoders`,
on top of `cached_decoder` and `kv_cache`; `cuda_graphs` captures it.
"""
