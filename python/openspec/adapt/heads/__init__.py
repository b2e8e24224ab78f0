"""Heads that can be trained: found by discovery, one module for each way of drafting.

A module here that defines `KINDS` says how the heads of some methods are made.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from openspec.adapt.heads.parts import HeadKind
from openspec.errors import ConfigError


@functools.cache
def all_kinds() -> dict[str, HeadKind]:
    """The kinds of this package by name."""
    modules = [
        importlib.import_module(f"{__name__}.{info.name}")
        for info in pkgutil.iter_modules(__path__)
    ]
    kinds = [kind for module in modules for kind in vars(module).get("KINDS", ())]
    return {kind.name: kind for kind in sorted(kinds, key=lambda kind: kind.name)}


def kind_named(name: str) -> HeadKind:
    """The kind of that name.

    Raises:
        ConfigError: there is none, with those that there are.
    """
    kinds = all_kinds()
    if name not in kinds:
        raise ConfigError(f"--head {name!r}: heads that can be trained: {', '.join(kinds)}")
    return kinds[name]
