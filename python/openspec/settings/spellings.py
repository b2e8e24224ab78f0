"""Names of settings that are not openspec's, or no longer: data for `settings`.

Other engines' names are in `SPELLINGS`, names that openspec had in `REMOVED`. Both hold for flags,
environment variables, YAML keys and keyword arguments.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


class _Anything:
    def __contains__(self, value: object) -> bool:
        return True


ANYTHING = _Anything()
"""Every value."""


@dataclass(frozen=True, slots=True)
class Spelling:
    """What other engines call a setting, by one name or several.

    A value goes to the setting that it belongs to, if the command has that; else it is without
    effect where it is neutral, and ends the start where it is not.
    """

    names: tuple[str, ...]
    type: object = str
    setting: str | None = None
    """Another name of this setting."""
    revision_of: str | None = None
    """The revision of the hub's model that this setting names."""
    neutral: Container[object] = ()
    """Values that change nothing here."""
    otherwise: str = ""
    """Why any other value is refused, and the remedy."""
    note: str = ""
    """Logged for a neutral value that asks for something."""


_REQUESTS = "prompts are never logged; --access-log logs a line for every request"
_LORA = "LoRA is not supported; merge the adapter into the model's weights"

SPELLINGS = (
    Spelling(("tp", "tp_size"), int, setting="tensor_parallel_size"),
    Spelling(
        ("pipeline_parallel_size", "pp", "pp_size"),
        int,
        neutral=(1,),
        otherwise="layers are not dealt to devices; --replicas N runs an engine on each of several",
    ),
    Spelling(
        ("disable_custom_all_reduce",),
        bool,
        neutral=ANYTHING,
        note="ranks exchange sums in one way, in which their number does not change the text",
    ),
    Spelling(
        ("distributed_executor_backend",),
        neutral=("mp", "uni"),
        otherwise="ranks of an engine are threads of one process; drop it. Under Ray, "
        "openspec.serve.ray_app runs replicas",
        note="ranks of an engine are threads of one process",
    ),
    Spelling(
        ("enable_expert_parallel",),
        bool,
        neutral=(False,),
        otherwise="all experts of a mixture lie on one device; drop it, --replicas N adds engines",
    ),
    Spelling(
        ("data_parallel_size", "dp", "dp_size"),
        int,
        setting="replicas",
        neutral=(1,),
        otherwise="one engine runs here; python -m openspec.serve --replicas N runs several",
    ),
    Spelling(("block_size",), int, setting="page_size"),
    Spelling(("revision",), revision_of="model"),
    Spelling(
        ("trust_remote_code",), bool, neutral=ANYTHING, note="no code of a checkpoint is ever run"
    ),
    Spelling(
        ("enable_auto_tool_choice",),
        bool,
        neutral=(True,),
        otherwise="tool calls are found wherever a request brings tools; requests that want none "
        "say tool_choice 'none'",
    ),
    Spelling(
        ("max_logprobs",),
        int,
        neutral=range(21),
        otherwise="a request may ask for 20 log-probabilities at each position, and no more; "
        "drop it",
        note="a request may ask for up to 20",
    ),
    Spelling(("enforce_eager",), bool, neutral=ANYTHING, note="CUDA graphs are used all the same"),
    Spelling(("async_scheduling",), bool, neutral=ANYTHING),
    Spelling(("swap_space",), float, neutral=ANYTHING, note="no KV pages are swapped"),
    Spelling(
        ("enable_chunked_prefill",),
        bool,
        neutral=(True,),
        otherwise="long prompts are always computed in chunks; --max-num-batched-tokens sets "
        "how long a chunk may be",
    ),
    Spelling(("disable_log_requests",), bool, neutral=(True,), otherwise=_REQUESTS),
    Spelling(("enable_log_requests",), bool, neutral=(False,), otherwise=_REQUESTS),
    Spelling(
        ("disable_log_stats",),
        bool,
        neutral=(False,),
        otherwise="--stats-interval-s 0 ends the lines of statistics",
    ),
    Spelling(
        ("root_path",),
        neutral=("",),
        otherwise="the server answers at /; let the proxy strip its prefix",
    ),
    Spelling(("q",), setting="quantization"),
    Spelling(("enable_lora",), bool, neutral=(False,), otherwise=_LORA),
    Spelling(("lora_modules", "max_loras", "max_lora_rank"), otherwise=_LORA),
)
"""Names that vLLM has, and some of SGLang."""

SPECULATIVE_SPELLINGS = (
    Spelling(("model",), setting="draft_model"),
    Spelling(("revision",), revision_of="draft_model"),
    Spelling(
        ("draft_tensor_parallel_size",),
        int,
        neutral=(1,),
        otherwise="a drafter is not shared by ranks, whatever tensor_parallel_size is; drop it",
    ),
    Spelling(
        ("suffix_decoding_max_cached_requests",),
        int,
        neutral=(0,),
        otherwise="recent answers are kept by bytes: drop it, and set --draft-memory 64MiB",
    ),
    Spelling(
        (
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        ),
        float,
        neutral=ANYTHING,
        note="how much is copied follows from measured times and acceptance",
    ),
)
"""Keys of vLLM's `speculative_config`."""

VALUES = {"tool_call_parser": {"qwen3_xml": "qwen3_coder"}}
"""Other engines' values of openspec's own settings, by setting."""

REMOVED = {
    "max_total_body_bytes": "is fixed at 1/128 of the free memory, at least max_body_bytes",
    "max_num_prompt_logprobs": "is fixed at 4194304, answers included",
    "max_num_connections": "is fixed at 16384",
    "num_text_threads": "is fixed at 3",
    "grammar_memory": "is fixed at a quarter of the free memory, at least 1 GiB",
    "grammar_cache_memory": "is fixed at 1/64 of the free memory, at least 16 MiB",
    "max_failures_in_a_row": "is fixed at 3",
    "keep_alive_timeout_s": "is fixed at 30",
    "speculative_stats": "is always on: answers carry metrics.speculative_decoding",
    "check_weights": "is always on: a model whose weights hold NaN or infinity is refused",
    "allow_credentials": "is always off: browsers send an API key in a header",
    "docs": "is one switch with ui: --no-pages leaves both out",
    "ui": "is one switch with docs: --no-pages leaves both out",
    "draft_revision": "stands after the id: --draft-model ORG/NAME@REVISION",
    "match": "is always recent: the latest of several matches is copied",
}
"""What holds in place of a setting that openspec had; follows its name."""
