"""The sandbox runs code that a model wrote, and says which of its tests pass.

docs/tasks.md says how a test is judged, what the sandbox protects, and where its limits are.
"""

from .client import run_tests as run_tests
