"""A line through two measurements: the seconds of work by its size."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """Seconds of work that has a part which does not depend on its size."""

    fixed: float
    each: float

    def at(self, size: float) -> float:
        return self.fixed + self.each * size

    def times(self, factor: float, unit: float = 1.0) -> "Line":
        """`factor` times the seconds, by a size in which 1 of this line's is `unit`."""
        return Line(factor * self.fixed, factor * self.each / unit)

    @classmethod
    def through(cls, few: float, little: float, many: float, more: float) -> "Line":
        """`few` took `little` seconds, `many` took `more`. Neither part is below 0."""
        if many <= few:
            return cls(0.0, little / few)
        each = max(0.0, more - little) / (many - few)
        return cls(max(0.0, little - each * few), each)
