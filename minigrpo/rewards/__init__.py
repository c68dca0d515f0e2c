"""Rewards: users' functions, the scores that they and the task give, and who is called when."""

from ..fen import is_valid_fen as is_valid_fen
from .functions import RewardFunction as RewardFunction
from .functions import reward as reward
from .functions import similarity as similarity
from .scorer import RewardScorer as RewardScorer
