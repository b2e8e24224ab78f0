"""What config.json and hf_quant_config.json say of quantised weights: the dialects of FP8."""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from openspec.checkpoint.folder import find_file
from openspec.checkpoint.strict_json import JsonKeys, describe_value, read_json_object
from openspec.errors import ConfigError

logger = logging.getLogger(__name__)

CONFIG = "quantization_config"
OLD_CONFIG = "compression_config"  # of compressed-tensors
HF_QUANT_CONFIG = "hf_quant_config.json"
BLOCK = 128  # outputs, and inputs, of a block with one scale
CODES = "F8_E4M3"  # safetensors' name of the type
TENSOR, CHANNEL, BLOCKS = "tensor", "channel", "block"
INSTEAD = "take the checkpoint in bfloat16, or one in FP8 that docs/which_format.md lists"
_NOT_YET = "4-bit weights are not read yet"
_REFUSED = {
    "awq": _NOT_YET,
    "gptq": _NOT_YET,
    "auto-round": _NOT_YET,
    "pack-quantized": f"W4A16: {_NOT_YET}",
    "w4a16_awq": _NOT_YET,
    "w4a8_awq": _NOT_YET,
    "int-quantized": "INT8 (W8A8) is not read",
    "int8_sq": "INT8 (W8A8) is not read",
    "nvfp4-pack-quantized": "NVFP4 is not read",
    "nvfp4": "NVFP4 is not read",
    "nvfp4_awq": "NVFP4 is not read",
    "modelopt_fp4": "NVFP4 is not read",
    "mxfp4": "MXFP is not read",
    "mxfp4-pack-quantized": "MXFP is not read",
    "mxfp8-quantized": "MXFP is not read",
    "mxfp8": "MXFP is not read",
    "marlin": "Marlin's order of weights is not read",
    "marlin-24": "Marlin's order of weights is not read",
    "bitsandbytes": "bitsandbytes is not read",
    "quark": "Quark is not read",
    "gguf": "GGUF is not read",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a checkpoint's lists say; its tensors decide."""

    method: str
    """quant_method, as other engines take it for --quantization."""
    dialect: str
    """For people."""
    forms: frozenset[str]
    """Forms of scales that matrices may have."""
    scale_suffix: str = "weight_scale"
    """A tensor's scale is "X.weight_scale" beside "X.weight"."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantised: names, prefixes, globs, or regular expressions after re:."""
    targets: tuple[str, ...] = ("Linear",)
    """Modules that are, in the same forms; Linear: all."""
    source: str
    """The file and key, for messages."""
    has_static_activations: bool = False
    """Whether activations have scales in the files."""
    has_cache_scales: bool = False
    """Whether K and V have."""

    def ignores(self, module: str) -> bool:
        """Whether the lists leave the module as it is, by itself or as part of a fused one."""
        if not any(entry == "Linear" or _names(entry, module) for entry in self.targets):
            return True
        return any(_names(entry, module) for entry in self.ignored)


_SLOW = re.compile(r"\)[*+{]|([*+{][^*+{]*){7}")
"""Regular expressions that may take for ever to match the name of a module."""
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def _names(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], module) is not None
    head, _, last = entry.rpartition(".")
    parts = _FUSED.get(last)
    if parts is not None:
        return any(_names(f"{head}.{part}".lstrip("."), module) for part in parts)
    # A bare name, such as lm_head, is a last part too.
    return (
        module == entry
        or module.startswith(f"{entry}.")
        or module.endswith(f".{entry}")
        or fnmatch.fnmatchcase(module, entry)
    )


def read_declared(folder: Path, keys: JsonKeys) -> Declared | None:
    """The dialect that the folder's lists name; None: they name none.

    Raises:
        ConfigError: one that is not read, or lists that disagree.
    """
    config = keys.object(CONFIG) or keys.object(OLD_CONFIG)
    file = find_file(folder, HF_QUANT_CONFIG)
    beside = None
    if file is not None:
        beside = JsonKeys(read_json_object(file), str(folder / HF_QUANT_CONFIG)).object(
            "quantization"
        )
    if beside is None or beside.get("quant_algo") is None:  # of the KV cache alone
        return None if config is None else _read_config(config)
    declared = _modelopt(beside, "exclude_modules")
    if config is not None:
        other = _read_config(config)
        if (other.method, other.forms) != (declared.method, declared.forms) or (
            other.ignored and set(other.ignored) != set(declared.ignored)
        ):
            raise ConfigError(
                f"{beside.source} and {config.source} disagree about what is quantised: "
                f"{declared.dialect} and {other.dialect}, ignored "
                f"{describe_value(sorted(declared.ignored))} and "
                f"{describe_value(sorted(other.ignored))}; get the checkpoint anew"
            )
    return declared


def refuse_quantized(keys: JsonKeys) -> None:
    """Refuses a config.json that names a quantised model where none may be."""
    if keys.get(CONFIG) is not None:
        keys.refuse(CONFIG, "no such key", "give the unquantised checkpoint: heads are bfloat16")


def _read_config(config: JsonKeys) -> Declared:
    method = config.get("quant_method")
    if not isinstance(method, str):
        config.refuse("quant_method", f"the name of a method; {INSTEAD}")
    read = _READERS.get(method.lower())
    if read is None:
        _refuse(config, "quant_method", method, " or ".join(f'"{name}"' for name in _READERS))
    return read(config)


def _refuse(keys: JsonKeys, name: str, value: Any, expected: str) -> NoReturn:
    reason = _REFUSED.get(str(value).lower())
    keys.refuse(name, expected, f"{reason}; {INSTEAD}" if reason else INSTEAD)


def _modules(keys: JsonKeys, *names: str) -> tuple[str, ...]:
    found: list[str] = []
    for name in names:
        value = keys.get(name) or []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            keys.refuse(name, "a list of modules")
        for entry in map(str, value):
            if entry.startswith("re:"):
                try:
                    re.compile(entry[3:])
                except re.error:
                    keys.refuse(name, f"regular expressions after re:, not {entry!r}")
                if _SLOW.search(entry):
                    keys.refuse(name, f"fewer repeats, and none of a group, in {entry!r}")
            found.append(entry)
    return tuple(found)


def _check_block(keys: JsonKeys, name: str) -> None:
    if keys.get(name) != [BLOCK, BLOCK]:
        keys.refuse(name, f"[{BLOCK}, {BLOCK}]", f"other blocks are not read; {INSTEAD}")


def _fp8(keys: JsonKeys) -> Declared:
    """Qwen's blocks, or AutoFP8's scales of whole tensors."""
    if keys.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        keys.refuse("fmt", '"e4m3"', f"e5m2 weights are not read; {INSTEAD}")
    has_blocks = keys.get("weight_block_size") is not None
    if has_blocks:
        _check_block(keys, "weight_block_size")
    return Declared(
        method="fp8",
        dialect="FP8 blocks of 128 x 128" if has_blocks else "AutoFP8",
        forms=frozenset({BLOCKS if has_blocks else TENSOR}),
        scale_suffix="weight_scale_inv" if has_blocks else "weight_scale",
        ignored=_modules(keys, "modules_to_not_convert", "ignored_layers"),
        source=keys.source,
        has_static_activations=keys.get("activation_scheme") == "static",
        has_cache_scales=bool(keys.get("kv_cache_scheme")),
    )


def _compressed_tensors(keys: JsonKeys) -> Declared:
    formats = ("float-quantized", "naive-quantized")
    expected = " or ".join(f'"{name}"' for name in formats)
    if keys.get("format") not in formats:
        _refuse(keys, "format", keys.get("format"), expected)
    sparsity = keys.object("sparsity_config")
    if sparsity is not None and sparsity.values and sparsity.get("format") != "dense":
        sparsity.refuse("format", '"dense"', f"sparse weights are not read; {INSTEAD}")
    groups = keys.object("config_groups")
    if groups is None or not groups.values:
        keys.refuse("config_groups", "an object with a group")
    forms, targets, is_static = set(), list[str](), False
    for name in groups.values:
        group = groups.object(name)
        weights = None if group is None else group.object("weights")
        if group is None or weights is None:
            groups.refuse(name, "a group with weights", INSTEAD)
        if group.get("format") not in (None, *formats):
            _refuse(group, "format", group.get("format"), expected)
        if weights.get("num_bits") != 8 or weights.get("type") != "float":
            group.refuse(
                "weights", "8 bits of type float", f"other weights are not read; {INSTEAD}"
            )
        if not weights.boolean("symmetric", True):
            weights.refuse("symmetric", "true", f"zero points are not read; {INSTEAD}")
        strategy = weights.get("strategy")
        if strategy not in (TENSOR, CHANNEL, BLOCKS):
            weights.refuse("strategy", '"tensor", "channel" or "block"', INSTEAD)
        if strategy == BLOCKS:
            _check_block(weights, "block_structure")
        forms.add(str(strategy))
        targets += _modules(group, "targets")
        activations = group.object("input_activations")
        is_static |= activations is not None and activations.get("dynamic") is False
    return Declared(
        method="compressed-tensors",
        dialect=f"compressed-tensors {keys.get('format')}",
        forms=frozenset(forms),
        ignored=_modules(keys, "ignore"),
        targets=tuple(targets),
        source=keys.source,
        has_static_activations=is_static,
        has_cache_scales=bool(keys.get("kv_cache_scheme")),
    )


def _modelopt(keys: JsonKeys, ignored: str = "ignore") -> Declared:
    algo = keys.get("quant_algo")
    if algo != "FP8":
        _refuse(keys, "quant_algo", algo, '"FP8"')
    return Declared(
        method="modelopt",
        dialect="ModelOpt FP8",
        forms=frozenset({TENSOR}),
        ignored=_modules(keys, ignored, *(["exclude_modules"] if ignored == "ignore" else [])),
        source=keys.source,
        has_static_activations=True,
        has_cache_scales=bool(keys.get("kv_cache_quant_algo") or keys.get("kv_cache_scheme")),
    )


def _fbgemm(keys: JsonKeys) -> Declared:
    return Declared(
        method="fbgemm_fp8",
        dialect="fbgemm FP8",
        forms=frozenset({CHANNEL}),
        ignored=_modules(keys, "modules_to_not_convert"),
        source=keys.source,
    )


_READERS: Mapping[str, Callable[[JsonKeys], Declared]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "fbgemm_fp8": _fbgemm,
}


def declared_methods() -> Iterable[str]:
    """The values of quant_method that are read."""
    return _READERS
