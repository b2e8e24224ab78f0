"""Why models that openspec does not run are refused, by what their config.json calls them."""

from __future__ import annotations

import re

from openspec.checkpoint.strict_json import JsonKeys, JsonValue

SUPPORTED = (
    "openspec runs the dense text models of Llama 3, Mistral, Qwen2, Qwen2.5 and Qwen3, and the "
    "text of Qwen3.5"
)


HYBRID = "it has layers of linear attention or state spaces beside those of attention"
_EXPERTS = "it is a mixture of experts"
_WINDOWS = "some of its layers attend through a sliding window"
_IMAGES = "it reads images as well; give a text-only checkpoint"
REFUSED = (
    (
        r"qwen3(next|5moe|6|8)|qwen4|jamba|bamba|mamba|zamba|falconh1|nemotronh|lfm2|kimilinear",
        HYBRID,
    ),
    (r"gptoss", "it has attention sinks, sliding windows and experts"),
    (r"ministral3", "it scales queries by their position"),
    (r"ministral|gemma2|gemma3(text|forcausal)|cohere2|exaone4|olmo3", _WINDOWS),
    (r"mistral3|pixtral", f"{_IMAGES} such as mistralai/Mistral-Small-24B-Instruct-2501"),
    (r"\w*vl(moe|text)?(for|$)|mllama|llava|gemma3|gemma4|llama4|internvl|\w*omni", _IMAGES),
    (r"\w*(moe|mixtral)|deepseekv|dbrx|grok|kimi|minimax", _EXPERTS),
)
"""Start of an architecture or model_type, small and without underscores -> why it is refused."""


def refuse_known(keys: JsonKeys, *, may_nest: bool) -> None:
    """Stops at a model that no target kind runs, with the reason.

    `may_nest`: its kind reads a text_config.

    Raises:
        ConfigError: the key that says so, and what openspec runs.
    """
    for architecture in named_architectures(keys):
        _refuse_name(keys, "architectures", architecture)
    _refuse_name(keys, "model_type", keys.get("model_type"))
    for name in ("vision_config", "text_config"):
        if keys.get(name) is not None and not may_nest:
            keys.refuse(name, "no such key", f"{_IMAGES}; {SUPPORTED}")
    for name in ("num_experts", "num_local_experts", "moe_intermediate_size"):
        if keys.get(name):
            keys.refuse(name, "no such key", f"this is a mixture of experts; {SUPPORTED}")


def named_architectures(keys: JsonKeys) -> list[JsonValue]:
    """What `architectures` names, [None] if nothing."""
    named = keys.get("architectures")
    return named if isinstance(named, list) else [named]


def _refuse_name(keys: JsonKeys, name: str, value: JsonValue) -> None:
    if not isinstance(value, str):
        return
    plain = value.lower().replace("_", "").replace(".", "")
    for pattern, reason in REFUSED:
        if re.match(pattern, plain):
            keys.refuse(name, "a dense text model", f"{reason}; {SUPPORTED}")
