"""Completions of several turns: tools, environments, and the dialogues that they make."""
