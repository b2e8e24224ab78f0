"""Settings from four places: flag, environment, YAML file, default, in this order of precedence."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec

import openspec
from openspec.errors import ConfigError
from openspec.settings.names import Names, closest, with_revisions
from openspec.settings.setting import ENV_PREFIX, Raw, Setting, SettingsGroup

logger = logging.getLogger(__name__)

BUILD_VARIABLES = ("OPENSPEC_CUDA", "OPENSPEC_CUDA_ARCHS", "OPENSPEC_CONFIG")


def parse_command_line(
    groups: Sequence[SettingsGroup],
    prog: str,
    description: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Raw]:
    """Values of all settings that were given somewhere; the rest keep their defaults.

    `--config FILE` (or OPENSPEC_CONFIG) names a YAML file. A name declared by several groups is one
    flag. The value of a setting `model` may stand without its flag. What follows the first
    paragraph of `description` stands at the end of `--help`.

    Raises:
        ConfigError: for an unknown name (with the nearest one) or a value that does not fit.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    variables = os.environ if environ is None else environ
    names = Names(groups)
    parser = _parser(groups, names, prog, description)
    known, rest = parser.parse_known_args(_check_flags(arguments, names))
    parsed: dict[str, Raw] = vars(known)
    if rest and rest[0].startswith("-"):
        raise ConfigError(f"unknown flag {rest[0]}")
    if rest and "model" in names.settings and "--model" not in parsed:
        parsed["--model"] = rest.pop(0)
    if rest:
        raise ConfigError(f"{rest[0]!r} stands alone: it is the value of no flag")

    words = {one.flag for one in names.settings.values() if one.takes_words}
    file_name = parsed.pop("config", None) or variables.get("OPENSPEC_CONFIG")
    flags = {
        flag: ",".join(map(str, raw)) if isinstance(raw, list) and flag in words else raw
        for flag, raw in parsed.items()
    }
    values: dict[str, Raw] = {}
    for found in (
        from_file(Path(str(file_name)), names) if file_name else {},
        _from_environment(variables, names),
        names.read(flags.items()),
    ):
        pairs = {
            # What comes later wins, also over another name of the same option.
            name: {**{key: had[key] for key in had if key not in new}, **new}
            for name, new in found.items()
            if isinstance(new, dict)
            and isinstance(had := values.get(name), dict)
            and names.settings[name].takes_pairs
        }
        values |= found | pairs
    return with_revisions(values)


def from_file(path: Path, names: Names) -> dict[str, Raw]:
    """Reads a YAML file of settings.

    Raises:
        ConfigError: if it cannot be read, or names something unknown.
    """
    try:
        content = msgspec.yaml.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected a mapping of settings")
    return names.read(((str(key), raw) for key, raw in content.items()), f"{path}: ")


def _from_environment(variables: Mapping[str, str], names: Names) -> dict[str, Raw]:
    given: dict[str, Raw] = {}
    for variable, raw in variables.items():
        if not variable.startswith(ENV_PREFIX) or variable in BUILD_VARIABLES:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if raw.startswith("tcp://"):
            # Kubernetes sets OPENSPEC_PORT=tcp://... in a namespace with a service "openspec".
            logger.warning("ignoring %s=%s: a service link, not a setting", variable, raw)
        elif name in names or names.why_not(name):
            given[variable] = raw
        elif close := closest(name, names.settings):
            raise ConfigError(
                f"unknown environment variable {variable}; did you mean "
                f"{names.settings[close].variable!r}?"
            )
        else:
            logger.warning("ignoring unknown environment variable %s", variable)
    return names.read(given.items())


def _check_flags(arguments: list[str], names: Names) -> list[str]:
    """Names the nearest flag for an unknown one, and accepts underscores and `-tp`."""
    flags = {"--help", "--config", "--version"}
    types = {one.flag: one.type for one in names.settings.values()}
    types |= {"--" + name.replace("_", "-"): one.type for name, one in names.spellings.items()}
    flags |= types.keys() | {"--no-" + flag[2:] for flag, kind in types.items() if kind is bool}
    checked = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag.startswith("-") and "-" + flag.replace("_", "-") in flags:
            flag = "-" + flag
        if flag.startswith("--") and len(flag) > 2:
            flag = flag.replace("_", "-")
            name = names.name_of(flag)
            if flag not in flags and (why := names.why_not(name.removeprefix("no_"))):
                raise ConfigError(f"{flag} {why}")
            if flag not in flags:
                is_off = flag.startswith("--no-")
                alike = [known[2:] for known in flags if known.startswith("--no-") == is_off]
                close = closest(flag[2:], alike)
                hint = f"did you mean '--{close}'?" if close else "--help lists all"
                raise ConfigError(f"unknown flag {flag}; {hint}")
            argument = flag + equals + value
        checked.append(argument)
    return checked


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def _parser(
    groups: Sequence[SettingsGroup], names: Names, prog: str, description: str
) -> argparse.ArgumentParser:
    opening, _, closing = description.partition("\n\n")
    parser = _Parser(
        prog=prog,
        usage=f"{prog} {'[MODEL] ' if 'model' in names.settings else ''}[--flag VALUE ...]",
        description=opening,
        epilog=closing,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"openspec {openspec.__version__}")
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file of settings."
    )
    shown: set[str] = set()
    for group in groups:
        section = parser.add_argument_group(group.title)
        for setting in group.settings:
            if setting.name in shown:
                continue
            shown.add(setting.name)
            _add_flag(section, setting, setting.full_help.replace("%", "%%"))
    for name, spelling in names.spellings.items():
        _add_flag(parser, Setting(name, spelling.type, "", None), argparse.SUPPRESS)
    return parser


def _add_flag(section: argparse._ActionsContainer, setting: Setting, text: str) -> None:
    """`dest` is the flag, by which errors name it."""
    kinds: dict[str, Any] = {"metavar": setting.metavar}
    if setting.type is bool:
        kinds = {"action": argparse.BooleanOptionalAction}
    elif setting.takes_pairs:
        kinds["action"] = "append"
    elif setting.takes_words:
        kinds["nargs"] = "+"
    flag = setting.flag
    section.add_argument(flag, dest=flag, default=argparse.SUPPRESS, help=text, **kinds)
