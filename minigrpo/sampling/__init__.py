"""Decoding: from prompts to sampled completions.

`generate.py` has the loop and the `Sampler` that the trainer calls. `decoder.py` runs the model
with a KV cache, `pick.py` picks tokens, `drafts.py` proposes tokens for speculative decoding.
"""
