"""The log: what comes again and again is counted."""

from __future__ import annotations

import logging

from openspec.engine.processes.log import MAX_ALIKE, Repeats


def record(text: str, seconds: float, *args: object, level: int = logging.WARNING):
    made = logging.LogRecord("openspec.x", level, __file__, 1, text, args, None)
    made.created = seconds
    return made


def test_one_line_a_second_and_how_many_there_were() -> None:
    repeats, written = Repeats(), []
    for number in range(3000):
        line = record("a replay is asked for with an empty frame", 100 + number / 1000)
        if repeats.filter(line):
            written.append(line.getMessage())
    assert (
        written
        == ["a replay is asked for with an empty frame"]
        + ["a replay is asked for with an empty frame (and 999 more like it)"] * 2
    )


def test_different_lines_of_one_kind_are_written_up_to_a_limit() -> None:
    repeats = Repeats()
    passed = [repeats.filter(record("engine %d", 1, number)) for number in range(100)]
    assert sum(passed) == MAX_ALIKE
    assert repeats.filter(record("another", 1))
    assert all(repeats.filter(record("ready", 1, level=logging.INFO)) for _ in range(100))
