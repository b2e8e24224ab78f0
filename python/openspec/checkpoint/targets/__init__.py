"""Kinds of targets: found by discovery, described by themselves, never named by anyone else.

A kind is one module here with a `KIND` and one file in `csrc/model/targets`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from openspec.checkpoint.strict_json import JsonKeys
from openspec.checkpoint.targets.kind import TargetKind
from openspec.checkpoint.targets.refusals import SUPPORTED, named_architectures, refuse_known


@functools.cache
def all_kinds() -> tuple[TargetKind, ...]:
    """The kinds of this package, found on first use."""
    modules = [
        importlib.import_module(f"{__name__}.{info.name}")
        for info in pkgutil.iter_modules(__path__)
    ]
    found = [vars(module).get("KIND") for module in modules]
    return tuple(kind for kind in found if isinstance(kind, TargetKind))


def kind_of(keys: JsonKeys) -> TargetKind:
    """The kind that runs the model of a config.json.

    Raises:
        ConfigError: none does, with the reason.
    """
    model_type = keys.get("model_type")
    nesting = [name for kind in all_kinds() if kind.has_text_config for name in kind.architectures]
    refuse_known(keys, may_nest=model_type in nesting)
    for kind in all_kinds():
        if isinstance(model_type, str) and model_type in kind.architectures:
            architecture = kind.architectures[model_type]
            if named_architectures(keys) not in ([None], [architecture]):
                keys.refuse("architectures", f'["{architecture}"]', SUPPORTED)
            return kind
    expected = ", ".join(f'"{name}"' for kind in all_kinds() for name in kind.architectures)
    keys.refuse("model_type", f"one of {expected}", SUPPORTED)
