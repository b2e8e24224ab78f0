"""The drafters: found by discovery, described by themselves, never named by anyone else.

A drafter is one C++ file, one module here with a `SPEC`, and one page in `docs/methods/`. Methods
that share files have a folder; what reads their checkpoints' formats is there, without a `SPEC`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from openspec.drafters.spec import DrafterSpec
from openspec.errors import ConfigError
from openspec.settings.names import nearest


@functools.cache
def _registry() -> dict[str, DrafterSpec]:
    """Specs by name, filled from this package's modules on first use."""
    specs: dict[str, DrafterSpec] = {}
    for module_info in pkgutil.walk_packages(__path__, f"{__name__}."):
        spec = vars(importlib.import_module(module_info.name)).get("SPEC")
        if isinstance(spec, DrafterSpec):
            _add(specs, spec)
    return specs


def _add(specs: dict[str, DrafterSpec], spec: DrafterSpec) -> None:
    for name in (spec.name, *spec.aliases):
        if any(name in (other.name, *other.aliases) for other in specs.values()):
            raise ConfigError(f"a drafter named {name!r} exists already")
    specs[spec.name] = spec


def available_drafters() -> list[str]:
    """Names of all drafters, in alphabetical order."""
    return sorted(_registry())


def all_drafters() -> list[DrafterSpec]:
    """The specs of all drafters, in alphabetical order of their names."""
    return [_registry()[name] for name in available_drafters()]


def get_drafter(name: str) -> DrafterSpec:
    """The spec of a method, by its name or one of its aliases.

    Raises:
        ConfigError: with the nearest name.
    """
    for spec in all_drafters():
        if name == spec.name or name in spec.aliases:
            return spec
    names = available_drafters()
    raise ConfigError(
        f"unknown method {name!r}{nearest(name, names)}; available: {', '.join(names)}"
    )


def option_names() -> tuple[str, ...]:
    """Options of all methods, by their own names and their aliases."""
    return tuple(dict.fromkeys(name for spec in all_drafters() for name in spec.options_by_name))


def parts_of_targets() -> dict[str, str]:
    """Start of the names of tensors in targets' files with which methods draft -> who does."""
    return {
        spec.target_prefix: f"--method {spec.name} drafts with it"
        for spec in all_drafters()
        if spec.target_prefix
    }


def examples(command: str) -> str:
    """Lines that show a command with every kind of draft model."""
    return "\n".join(
        f"  {command} {model} --method {spec.name} --draft-model {draft_model}"
        for spec in all_drafters()
        if spec.example is not None
        for model, draft_model in [spec.example]
    )


def default_method() -> str:
    """The method used when none is named."""
    return next(spec.name for spec in all_drafters() if spec.is_default)


def plain_method() -> str:
    """The method that drafts nothing, which the others are compared with."""
    return next(spec.name for spec in all_drafters() if spec.max_num_speculative_tokens == 0)


def register_drafter(spec: DrafterSpec) -> None:
    """Adds a drafter of this process, written in Python (`spec.build`), for research and tests."""
    _add(_registry(), spec)


def unregister_drafter(name: str) -> None:
    """Takes back `register_drafter`."""
    del _registry()[name]
