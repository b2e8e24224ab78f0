"""The names by which settings are given: their own, other engines', and what is said of others."""

from __future__ import annotations

import difflib
import itertools
import logging
from collections.abc import Iterable, Mapping

from openspec.errors import ConfigError
from openspec.settings.setting import ENV_PREFIX, Raw, Setting, SettingsGroup
from openspec.settings.spellings import REMOVED, SPELLINGS, Spelling

logger = logging.getLogger(__name__)

MIN_LIKENESS = 0.8
"""Share of the letters that a name and the one suggested for it have in common."""
REVISION = "@revision"
"""Follows the name of a setting: the revision of the model that it names."""


class Names:
    """All names by which a command's settings can be given."""

    def __init__(
        self, groups: Iterable[SettingsGroup], spellings: Iterable[Spelling] = SPELLINGS
    ) -> None:
        self.settings = {one.name: one for group in groups for one in group.settings}
        self._by_flag = {one.flag: one.name for one in self.settings.values()}
        self.spellings = {
            name: one for one in spellings for name in one.names if name not in self.settings
        }

    def __contains__(self, name: str) -> bool:
        return name in self.settings or name in self.spellings

    def name_of(self, key: str) -> str:
        """The name in a flag, a variable or a key of a file."""
        if key in self._by_flag:
            return self._by_flag[key]
        if key.startswith(ENV_PREFIX):
            return key.removeprefix(ENV_PREFIX).lower()
        return key.lstrip("-").replace("-", "_")

    def why_not(self, name: str) -> str | None:
        """What holds in place of a name that is a setting no longer; follows the name."""
        if name in self:
            return None
        for setting in self.settings.values():
            if setting.takes_pairs and name in setting.choices:
                return (
                    f"is an option of a method: {setting.flag} {name}=VALUE, or {name} within "
                    f"{setting.name}"
                )
        return REMOVED.get(name)

    def read(self, given: Iterable[tuple[str, Raw]], place: str = "") -> dict[str, Raw]:
        """Checked values by the names of their settings, from keys and values of one place.

        Raises:
            ConfigError: for an unknown name (with the nearest one) or a value that does not fit.
        """
        values: dict[str, Raw] = {}
        value: Raw
        for key, raw in given:
            name = self.name_of(key)
            if why := self.why_not(name):
                raise ConfigError(f"{place}{key} {why}")
            if name not in self:
                raise ConfigError(f"{place}unknown setting {key!r}{nearest(name, self.settings)}")
            if name in self.spellings:
                found = self._translated(name, raw, f"{place}{key}")
                if found is None:
                    continue
                name, value = found
            else:
                value = self.settings[name].convert(raw, f"{place}{key}")
            if name in values and values[name] != value:
                raise ConfigError(f"{place}{key}: {name} is given twice; drop one of them")
            values[name] = value
        return values

    def _translated(self, name: str, raw: Raw, source: str) -> tuple[str, Raw] | None:
        """The setting that another engine's name means, and its value; None: it changes nothing."""
        spelling = self.spellings[name]
        if raw is None:
            return None
        if spelling.setting in self.settings:
            return spelling.setting, self.settings[spelling.setting].convert(raw, source)
        value: Raw = raw
        if spelling.neutral != ():
            value = Setting(name, spelling.type, "", None).convert(raw, source)
        if spelling.revision_of in self.settings:
            return f"{spelling.revision_of}{REVISION}", str(raw)
        if value not in spelling.neutral:
            shown = source if raw is True else f"{source} {raw}"
            raise ConfigError(f"{shown}: {spelling.otherwise}")
        if value and spelling.note:
            logger.warning("%s has no effect: %s", source, spelling.note)
        return None


def with_revisions(values: Mapping[str, Raw]) -> dict[str, Raw]:
    """Values with each revision after the id that it is of: `org/name@revision`.

    Raises:
        ConfigError: there is no id.
    """
    joined = dict(values)
    for name in values:
        owner = name.removesuffix(REVISION)
        if owner != name:
            revision = joined.pop(name)
            if joined.get(owner) is None:
                raise ConfigError(f"revision {revision} is of no {owner}: none is named; drop it")
            joined[owner] = f"{joined[owner]}@{revision}"
    return joined


def nearest(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a name that is hardly spelled otherwise, or nothing.

    Of names equally close, the one that begins alike for longest.
    """
    best = closest(name, names)
    return f"; did you mean {best!r}?" if best else ""


def closest(name: str, names: Iterable[str]) -> str:
    """The name that `nearest` suggests, or ""."""

    def likeness(other: str) -> tuple[float, int]:
        ratio = difflib.SequenceMatcher(None, name, other, autojunk=False).ratio()
        if sorted(name) == sorted(other):  # letters that changed places
            ratio = max(ratio, MIN_LIKENESS)
        pairs = zip(name, other, strict=False)
        return ratio, len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))

    best = max(sorted(names), key=likeness, default="")
    return best if likeness(best)[0] >= MIN_LIKENESS else ""
