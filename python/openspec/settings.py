"""Settings from four places: flag, environment, YAML file, default, in this order of precedence.

A setting is a field of a dataclass (its docstring is the help text) or an option that a drafter
declares. The same name serves everywhere: `max_num_seqs` in YAML, `--max-num-seqs` as a flag,
`OPENSPEC_MAX_NUM_SEQS` in the environment.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import itertools
import logging
import os
import sys
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import msgspec

from openspec.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

T = TypeVar("T")
DataclassT = TypeVar("DataclassT", bound="DataclassInstance")
Raw: TypeAlias = "str | int | float | bool | list[Raw] | dict[str, Raw] | None"
"""A value as it stands in a file, an environment or on the command line."""

ENV_PREFIX = "OPENSPEC_"
BUILD_VARIABLES = ("OPENSPEC_CUDA", "OPENSPEC_CUDA_ARCHS", "OPENSPEC_CONFIG")

_UNITS = {
    "": 1,
    "b": 1,
    **{
        f"{letter}{suffix}": base**power
        for power, letter in enumerate("kmgt", start=1)
        for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
    },
}


def number(default: T, low: float, high: float, *, is_bytes: bool = False) -> T:
    """A field for a number in [low, high], or None; one in bytes also takes "2GiB"."""
    return dataclasses.field(default=default, metadata={"range": (low, high), "is_bytes": is_bytes})


def check_ranges(config: DataclassInstance) -> None:
    """Checks every field made by `number`.

    Raises:
        ConfigError: with the setting, its value and the allowed range.
    """
    values = dataclasses.asdict(config)
    for field in dataclasses.fields(config):
        value = values[field.name]
        if "range" in field.metadata and value is not None:
            low, high = field.metadata["range"]
            if not low <= value <= high:
                raise ConfigError(f"{field.name} must be in [{low}, {high}], got {value}")


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One setting: a name, what it accepts and what it is for."""

    name: str
    type: object
    """A type that msgspec converts to."""
    help: str
    default: Raw
    is_bytes: bool = False
    choices: tuple[str, ...] = ()
    """For `--help`; whoever reads the value checks it."""
    takes_words: bool = False
    """Whether the flag takes all words up to the next one, as a list."""

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The name in the environment."""
        return ENV_PREFIX + self.name.upper()

    @property
    def is_list(self) -> bool:
        """Whether it takes several values, separated by commas or as a JSON list."""
        kinds = (self.type, *typing.get_args(self.type))
        return any(typing.get_origin(kind) is list for kind in kinds)

    @property
    def is_mapping(self) -> bool:
        """Whether it takes a JSON object."""
        return any(typing.get_origin(kind) is dict for kind in typing.get_args(self.type))

    @property
    def literals(self) -> tuple[str, ...]:
        """The only values that fit, where the type lists them."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    def convert(self, raw: Raw, source: str) -> Raw:
        """Checks one value.

        Raises:
            ConfigError: with where the value came from.
        """
        try:
            if self.is_bytes and isinstance(raw, str):
                return parse_bytes(raw)
            given: object = raw
            if isinstance(raw, str) and self.is_list:
                given = [part.strip() for part in raw.split(",") if part.strip()]
                if raw.startswith("["):
                    given = msgspec.json.decode(raw)
            if isinstance(raw, str) and self.is_mapping:
                given = msgspec.json.decode(raw)
            value: Raw = msgspec.convert(given, self.type, strict=not isinstance(raw, str))
            return value
        except (msgspec.MsgspecError, ConfigError) as error:
            choose = f"; choose from {', '.join(self.literals)}" if self.literals else ""
            raise ConfigError(f"{source}: {raw!r} does not fit: {error}{choose}") from None


@dataclasses.dataclass(frozen=True, slots=True)
class SettingsGroup:
    """Settings under one heading of `--help`."""

    title: str
    settings: tuple[Setting, ...]


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest of the names, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def parse_bytes(text: str) -> int:
    """Reads "512MiB", "2GB", "1.5g" or a plain number of bytes.

    Raises:
        ConfigError: if the text is not a size.
    """
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text.strip()[len(number) :].strip().lower()
    try:
        return int(float(number) * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"{text!r} is not a size such as 512MiB or 2GiB") from None


def format_bytes(num_bytes: int) -> str:
    """A size for people: "1.50 GiB"."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a class, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    docs: dict[str, str] = {}
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for node, following in itertools.pairwise(body):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[node.target.id] = " ".join(following.value.value.split())
    return docs


def group_of(title: str, cls: type[DataclassInstance], skip: Sequence[str] = ()) -> SettingsGroup:
    """The fields of a dataclass as settings."""
    docs, types = field_docs(cls), typing.get_type_hints(cls)
    settings = []
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        default: Raw = None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            default = field.default
        settings.append(
            Setting(
                name=field.name,
                type=types[field.name],
                help=docs.get(field.name, ""),
                default=default,
                is_bytes=field.metadata.get("is_bytes", False),
                choices=tuple(field.metadata.get("choices", ())),
                takes_words="words" in field.metadata,
            )
        )
    return SettingsGroup(title, tuple(settings))


def build(cls: type[DataclassT], values: Mapping[str, Raw]) -> DataclassT:
    """Makes a settings dataclass from those of the values that are its fields.

    Raises:
        ConfigError: for a value of the wrong type.
    """
    names = {field.name for field in dataclasses.fields(cls)}
    try:
        return msgspec.convert({k: v for k, v in values.items() if k in names}, cls)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None


def parse_command_line(
    groups: Sequence[SettingsGroup],
    prog: str,
    description: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    version: str = "",
) -> dict[str, Raw]:
    """Values of all settings that were given somewhere; the rest keep their defaults.

    `--config FILE` (or OPENSPEC_CONFIG) names a YAML file. A name declared by several groups is one
    flag. The value of a setting `model` may stand without its flag.

    Raises:
        ConfigError: for an unknown name (with the nearest one) or a value that does not fit.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    variables = os.environ if environ is None else environ
    by_name = {setting.name: setting for group in groups for setting in group.settings}
    parser = _parser(groups, prog, description, version)
    known, rest = parser.parse_known_args(_check_flags(arguments, by_name))
    parsed: dict[str, Raw] = vars(known)
    if rest and rest[0].startswith("-"):
        raise ConfigError(f"unknown flag {rest[0]}")
    if rest and "model" in by_name and "model" not in parsed:
        parsed["model"] = rest.pop(0)
    if rest:
        raise ConfigError(f"{rest[0]!r} stands alone: it is the value of no flag")

    values: dict[str, Raw] = {}
    file_name = parsed.pop("config", None) or variables.get("OPENSPEC_CONFIG")
    if file_name:
        values |= from_file(Path(str(file_name)), by_name)
    values |= _from_environment(variables, by_name)
    for name, raw in parsed.items():
        one = ",".join(map(str, raw)) if isinstance(raw, list) else raw
        values[name] = by_name[name].convert(one, by_name[name].flag)
    return values


def from_file(path: Path, by_name: Mapping[str, Setting]) -> dict[str, Raw]:
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
    values: dict[str, Raw] = {}
    for key, raw in content.items():
        name = str(key).replace("-", "_")
        if name not in by_name:
            raise ConfigError(f"{path}: unknown setting {key!r}{nearest(name, by_name)}")
        values[name] = by_name[name].convert(raw, f"{path}: {key}")
    return values


def _from_environment(
    variables: Mapping[str, str], by_name: Mapping[str, Setting]
) -> dict[str, Raw]:
    by_variable = {setting.variable: setting for setting in by_name.values()}
    values: dict[str, Raw] = {}
    for variable, raw in variables.items():
        if not variable.startswith(ENV_PREFIX) or variable in BUILD_VARIABLES:
            continue
        if raw.startswith("tcp://"):
            # Kubernetes sets OPENSPEC_PORT=tcp://... in a namespace with a service "openspec".
            logger.warning("ignoring %s=%s: a service link, not a setting", variable, raw)
        elif variable in by_variable:
            values[by_variable[variable].name] = by_variable[variable].convert(raw, variable)
        elif close := difflib.get_close_matches(
            variable.removeprefix(ENV_PREFIX).lower(), list(by_name), n=1, cutoff=0.75
        ):
            raise ConfigError(
                f"unknown environment variable {variable}; did you mean "
                f"{by_name[close[0]].variable!r}?"
            )
        else:
            logger.warning("ignoring unknown environment variable %s", variable)
    return values


def _check_flags(arguments: list[str], by_name: Mapping[str, Setting]) -> list[str]:
    """Names the nearest flag for an unknown one, and accepts underscores."""
    flags = {"--help", "--config", "--version"}
    for setting in by_name.values():
        flags.add(setting.flag)
        if setting.type is bool:
            flags.add("--no-" + setting.flag[2:])
    checked = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag.startswith("--") and len(flag) > 2:
            flag = flag.replace("_", "-")
            if flag not in flags:
                raise ConfigError(f"unknown flag {flag}{nearest(flag, flags)}")
            argument = flag + equals + value
        checked.append(argument)
    return checked


def _parser(
    groups: Sequence[SettingsGroup], prog: str, description: str, version: str
) -> argparse.ArgumentParser:
    has_model = any(setting.name == "model" for group in groups for setting in group.settings)
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} {'[MODEL] ' if has_model else ''}[--flag VALUE ...]",
        description=description,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"openspec {version}")
    parser.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="YAML file of settings."
    )
    seen: set[str] = set()
    for group in groups:
        section = parser.add_argument_group(group.title)
        for setting in group.settings:
            if setting.name in seen:
                continue
            seen.add(setting.name)
            shown = setting.help
            if setting.default is not None and setting.default not in ("", [], {}):
                shown += f" (default: {setting.default})"
            shown = shown.replace("%", "%%")
            if setting.type is bool:
                section.add_argument(
                    setting.flag,
                    dest=setting.name,
                    action=argparse.BooleanOptionalAction,
                    default=argparse.SUPPRESS,
                    help=shown,
                )
            else:
                section.add_argument(
                    setting.flag,
                    dest=setting.name,
                    nargs="+" if setting.takes_words else None,
                    default=argparse.SUPPRESS,
                    metavar=_metavar(setting),
                    help=shown,
                )
    return parser


def _metavar(setting: Setting) -> str:
    if choices := setting.choices or setting.literals:
        return "{" + ",".join(choices) + "}"
    return "SIZE" if setting.is_bytes else setting.name.rpartition("_")[2].upper()
