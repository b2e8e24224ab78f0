"""A setting: a field of a dataclass, whose docstring is the help text."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import msgspec

from openspec.errors import ConfigError, wrong_type
from openspec.settings.spellings import VALUES

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
DataclassT = TypeVar("DataclassT", bound="DataclassInstance")
Raw: TypeAlias = "str | int | float | bool | list[Raw] | dict[str, Raw] | None"
"""A value as it stands in a file, an environment or on the command line."""

ENV_PREFIX = "OPENSPEC_"
EXPECTED: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}
"""Values of a type, for people."""
_UNIONS = (typing.Union, types.UnionType)

_UNIT_OF = {"S": "SECONDS", "TIMEOUT": "SECONDS", "LEN": "TOKENS", "TOKENS": "TOKENS"}
"""What a number counts, by the last word of its name."""
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


def named(default: T, metavar: str) -> T:
    """A field whose value `--help` names in one word, such as FILE."""
    return dataclasses.field(default=default, metadata={"metavar": metavar})


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
    value_name: str = ""
    """What `metavar` says, where its rules say something else."""
    choices: tuple[str, ...] = ()
    """For `--help`; whoever reads the value checks it."""
    takes_words: bool = False
    """Whether the flag takes all words up to the next one, as a list."""
    takes_pairs: bool = False
    """Whether it is a mapping, of which each `name=value` has a flag, named in the singular;
    `choices` are the names."""

    @property
    def flag(self) -> str:
        """The name on the command line."""
        name = self.name.removesuffix("s") if self.takes_pairs else self.name
        return "--" + name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The name in the environment."""
        return ENV_PREFIX + self.name.upper()

    @property
    def kinds(self) -> tuple[object, ...]:
        """The types of which it takes values, without None."""
        kinds = typing.get_args(self.type) if typing.get_origin(self.type) in _UNIONS else ()
        return tuple(kind for kind in kinds or (self.type,) if kind is not type(None))

    @property
    def is_list(self) -> bool:
        """Whether it takes several values, separated by commas or as a JSON list."""
        return any(typing.get_origin(kind) is list for kind in self.kinds)

    @property
    def is_mapping(self) -> bool:
        """Whether it takes a JSON object."""
        return any(typing.get_origin(kind) is dict for kind in self.kinds)

    @property
    def literals(self) -> tuple[str, ...]:
        """The only values that fit, where the type lists them."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    @property
    def metavar(self) -> str:
        """What stands for the value in `--help`: its unit, what it names, or the choices."""
        words = self.name.upper().split("_")
        if self.value_name:
            return self.value_name
        if self.takes_pairs:
            return "NAME=VALUE"
        if choices := self.choices or self.literals:
            return "{" + ",".join(choices) + "}" + ",..." * self.is_list
        if self.is_bytes:
            return "SIZE"
        if self.is_mapping or dict in self.kinds:
            return "JSON"
        if self.is_list and not self.takes_words:
            return f"{words[-1].removesuffix('S')},..."
        if not {int, float} & {*self.kinds}:
            return words[-1]
        is_count = "NUM" in words
        if words[-1] in _UNIT_OF and not is_count:
            return _UNIT_OF[words[-1]]
        return "N" if int in self.kinds else "X"

    @property
    def shown_default(self) -> str:
        """The default as it is typed; empty where there is nothing to type."""
        if self.default is None or self.default in ("", [], {}):
            return ""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if isinstance(self.default, list):
            return ",".join(map(str, self.default))
        if self.is_bytes and isinstance(self.default, int):
            return _typed_bytes(self.default)
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def full_help(self) -> str:
        """The help text with the default, unless the text says what holds by default."""
        return f"{self.help} Default: {shown}." if (shown := self.shown_default) else self.help

    @property
    def expected(self) -> str:
        """What values look like, for people."""
        if self.literals:
            return f"one of {', '.join(self.literals)}"
        if self.takes_pairs:
            return "name=value"
        if self.is_list:
            return "a list: values with commas between them, or JSON"
        if self.is_mapping:
            return "a JSON object"
        return EXPECTED.get(self.kinds[0], "another value")

    def convert(self, raw: Raw, source: str) -> Raw:
        """Checks one value.

        Raises:
            ConfigError: with where the value came from.
        """
        if self.is_bytes and isinstance(raw, str):
            try:
                return parse_bytes(raw)
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from None
        if isinstance(raw, str):
            raw = VALUES.get(self.name, {}).get(raw, raw)
        given: Raw = raw
        try:
            if self.takes_pairs and (isinstance(raw, list) or not str(raw).startswith("{")):
                given = _pairs(raw)
            elif isinstance(raw, str) and self.is_list and not raw.startswith("["):
                given = [part.strip() for part in raw.split(",") if part.strip()]
            elif isinstance(raw, str) and (self.is_list or self.is_mapping):
                given = msgspec.json.decode(raw)
            strict = self.takes_pairs or not isinstance(raw, str)
            value: Raw = msgspec.convert(given, self.type, strict=strict)
            return value
        except (msgspec.MsgspecError, ValueError) as error:
            is_plain = self.takes_pairs or not (self.is_list or self.is_mapping)
            detail = "" if is_plain else f" ({wrong_type(error)})"
            raise ConfigError(f"{source} expects {self.expected}; got {raw!r}{detail}") from None


def _pairs(raw: Raw) -> dict[str, Raw]:
    """A mapping from words `name=value`; one is taken as it is.

    Raises:
        ValueError: for a word without the sign.
    """
    if isinstance(raw, dict):
        return raw
    pairs: dict[str, Raw] = {}
    for word in raw if isinstance(raw, list) else str(raw).split():
        name, sign, value = str(word).partition("=")
        if not (name and sign):
            raise ValueError(word)
        pairs[name.replace("-", "_")] = value
    return pairs


@dataclasses.dataclass(frozen=True, slots=True)
class SettingsGroup:
    """Settings under one heading of `--help`."""

    title: str
    settings: tuple[Setting, ...]


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


def _typed_bytes(num_bytes: int) -> str:
    """A size as `parse_bytes` reads it: 8388608 is "8MiB"."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit}"
    return str(num_bytes)


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a class and of those that it extends, on one line."""
    docs: dict[str, str] = {}
    for base in cls.__bases__:
        if dataclasses.is_dataclass(base):
            docs |= field_docs(base)
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
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
                value_name=field.metadata.get("metavar", ""),
                choices=tuple(field.metadata.get("choices", ())),
                takes_words="words" in field.metadata,
                takes_pairs="pairs" in field.metadata,
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
        raise ConfigError(wrong_type(error)) from None
