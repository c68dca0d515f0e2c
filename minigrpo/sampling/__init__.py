"""Decoding: from prompts to sampled completions.

`sampler` is what the trainer calls. `generate` is the loop, in which waiting prompts enter as
completions end. `running` holds the state of the completions, `params` picks tokens, and `drafts`
proposes tokens for speculative decoding. The model runs in one of the `decoders`, on top of
`cached_decoder` and `kv_cache`; `cuda_graphs` captures it.
"""
