"""The judge of tasks that ask for code, such as examples/one_liners.py and examples/mbpp.py."""

from ..sandbox.client import run_tests as run_tests
