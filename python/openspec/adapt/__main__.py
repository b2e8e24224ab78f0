"""`python -m openspec.adapt COMMAND`: draft heads for a model of your own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openspec.adapt import states, train
from openspec.adapt.cycle import compare, run, shadow, watch
from openspec.config import EngineConfig, parse_engine_args
from openspec.errors import ConfigError, EngineError, RequestError, check_is_built
from openspec.records.shards import erase
from openspec.settings.setting import build, check_ranges, group_of, named


@dataclass(frozen=True, slots=True)
class Command:
    """A command, its own settings, and what it returns for the terminal."""

    description: str
    settings: type[Any]
    run: Callable[[EngineConfig, Any], str]


def _train(config: EngineConfig, own: train.TrainConfig) -> str:
    return train.shown(config, own, train.Training(config, own).run())


def _run(config: EngineConfig, own: run.RunConfig) -> str:
    return run.Turn(config, own).run().shown


def _watch(_: EngineConfig, own: watch.WatchConfig) -> str:
    return f"{watch.watch(own)} alarms"


@dataclass(frozen=True)
class EraseConfig:
    """Which records go."""

    records: str | None = named(None, "DIR")
    """Folder that a server kept texts in, with --capture-dir."""


def _erase(config: EngineConfig, own: EraseConfig) -> str:
    if own.records is None:
        raise ConfigError("--records is needed")
    return f"{own.records}: {erase(Path(own.records))} files removed"


COMMANDS = {
    "run": Command(str(run.__doc__), run.RunConfig, _run),
    "train": Command(str(train.__doc__), train.TrainConfig, _train),
    "decide": Command(str(shadow.__doc__), shadow.DecideConfig, shadow.decide_heads),
    "watch": Command(str(watch.__doc__), watch.WatchConfig, _watch),
    "states": Command(str(states.__doc__), states.StatesConfig, states.serve),
    "erase": Command("Removes what a server kept in a folder.", EraseConfig, _erase),
    "score": Command(str(compare.__doc__), compare.ScoreConfig, compare.compare_heads),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    name, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name not in COMMANDS:
        is_asked = name in ("-h", "--help")
        names = " | ".join(COMMANDS)
        usage = f"usage: python -m openspec.adapt {names}, each with --help"
        print(usage, file=sys.stdout if is_asked else sys.stderr)
        return 0 if is_asked else 2
    command = COMMANDS[name]
    try:
        prog = f"python -m openspec.adapt {name}"
        groups = [group_of(name, command.settings)]
        config, values = parse_engine_args(prog, command.description, arguments, groups)
        own = build(command.settings, values)
        check_ranges(own)
        check_is_built()
        print(command.run(config, own))
    except (ConfigError, EngineError, RequestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
