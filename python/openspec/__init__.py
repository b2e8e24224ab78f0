"""openspec: speculative decoding that is exact and never slower.

    from openspec import LLM, SamplingParams
    outputs = LLM().generate("Once upon a time", SamplingParams(max_tokens=64))

Importing this package loads neither torch nor the C++ core; the names below load what they need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openspec.config import EngineConfig
    from openspec.drafters import available_drafters
    from openspec.engine.processes.client import EngineClient
    from openspec.errors import ConfigError, EngineError, RequestError
    from openspec.llm import LLM
    from openspec.messages import SamplingParams, SpeculativeOptions, StructuredOutputs
    from openspec.text.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "ConfigError",
    "EngineClient",
    "EngineConfig",
    "EngineError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeOptions",
    "StructuredOutputs",
    "available_drafters",
]

_HOMES = {
    "LLM": "llm",
    "CompletionOutput": "text.outputs",
    "ConfigError": "errors",
    "EngineClient": "engine.processes.client",
    "EngineConfig": "config",
    "EngineError": "errors",
    "RequestError": "errors",
    "RequestOutput": "text.outputs",
    "SamplingParams": "messages",
    "SpeculativeOptions": "messages",
    "StructuredOutputs": "messages",
    "available_drafters": "drafters",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = vars(importlib.import_module(f"{__name__}.{_HOMES[name]}"))[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
