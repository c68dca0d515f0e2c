"""Completions of several turns: tools, environments, and the dialogues that they make.

tools.py says what a model may call, environments.py what answers its turns, and dialogues.py keeps
what was said and turns it into tokens, for sampling/.
"""
