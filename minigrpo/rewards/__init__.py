"""Rewards: users' functions, the scores that they and the task give, and who is called when."""

from ..fen import is_valid_fen as is_valid_fen
