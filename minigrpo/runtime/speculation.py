"""The names in --speculate: the sources of proposals for speculative decoding."""

from .flags import ConfigError, shown

SOURCES = {  # what each reads; sampling/drafts.py says how
    "answer": "the known answer",
    "siblings": "the other completions of the prompt",
    "lookup": "the prompt, and the completion's own text",
}
AUTO, NONE = "auto", "none"


def parse_sources(text: str) -> tuple[str, ...]:
    """The sources of --speculate, in the order of SOURCES. Raises ConfigError."""
    named = {AUTO: list(SOURCES), NONE: []}.get(text, text.split(","))
    if unknown := [name for name in named if name not in SOURCES]:
        raise ConfigError(
            f"--speculate must be {AUTO}, {NONE} or a comma-separated list of "
            f"{', '.join(SOURCES)}, got {shown(unknown[0] or text)}"
        )
    return tuple(name for name in SOURCES if name in named)
