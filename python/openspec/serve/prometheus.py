"""Just enough of a Prometheus client: counters, gauges and histograms as text.

No process-wide registry: a server owns its metrics, and a family can be shown under two names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Family:
    """A metric without its prefix: kind, help and the samples of every label set."""

    def __init__(self, name: str, kind: str, documentation: str) -> None:
        self.name = name
        self.kind = kind
        self.documentation = documentation
        self._values: dict[tuple[tuple[str, str], ...], float] = {}

    def set(self, value: float, **labels: str) -> None:
        """Sets the sample of these labels."""
        self._values[tuple(labels.items())] = value

    def add(self, amount: float = 1.0, **labels: str) -> None:
        """Adds to the sample of these labels."""
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0.0) + amount

    def get(self, **labels: str) -> float:
        """The sample of these labels; 0 if there is none."""
        return self._values.get(tuple(labels.items()), 0.0)

    def lines(self, prefix: str, common: str) -> Iterator[str]:
        """Exposition lines; `common` holds the labels of every sample."""
        name = prefix + self.name
        yield f"# HELP {name} {self.documentation}"
        yield f"# TYPE {name} {self.kind}"
        for labels, value in self._values.items():
            yield f"{name}{{{_join(common, label_text(dict(labels)))}}} {_number(value)}"


class Histogram:
    """Counts of observations below fixed bounds."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.documentation = documentation
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `times` observations of one value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, prefix: str, common: str) -> Iterator[str]:
        """Exposition lines."""
        name = prefix + self.name
        yield f"# HELP {name} {self.documentation}"
        yield f"# TYPE {name} histogram"
        total = 0
        bounds = [*(_number(bound) for bound in self._bounds), "+Inf"]
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            yield f"{name}_bucket{{{_join(common, f'le={quote(bound)}')}}} {total}"
        yield f"{name}_sum{{{common}}} {_number(self._sum)}"
        yield f"{name}_count{{{common}}} {total}"


def label_text(labels: Mapping[str, str]) -> str:
    """Labels as they stand between the braces."""
    return ",".join(f"{name}={quote(value)}" for name, value in labels.items())


def quote(value: str) -> str:
    """A label value in quotes."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _join(*parts: str) -> str:
    return ",".join(part for part in parts if part)


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(value)
