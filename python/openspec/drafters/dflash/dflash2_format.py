"""DFlash2's keys: convolutions within the layers of a block, and a selector of candidates."""

from __future__ import annotations

from dataclasses import dataclass

from openspec.checkpoint.strict_json import JsonKeys

MAX_GROUP, MAX_RANK, MAX_CANDIDATES = 1 << 16, 256, 64
CONV_TENSORS = ("base_kernel", "kernel_projection.weight")
SELECTOR_TENSORS = (
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
    "candidate_selector.hidden_projection.weight",
)
NO_OTHER = "its kernels know no other; published heads have"


@dataclass(frozen=True, slots=True)
class BlockParts:
    """What a head has beside DFlash's layers; zeros: nothing."""

    conv_group: int
    """Columns that share a coefficient of a convolution."""
    selector_rank: int
    selector_top_k: int
    """Candidates of a position."""

    @property
    def kind(self) -> str:
        """What the head is called in messages."""
        return "DFlash2" if self.conv_group or self.selector_rank else "DFlash"

    @property
    def shown_kind(self) -> str:
        """What follows the format's name where the head is more than DFlash's."""
        return "" if self.kind == "DFlash" else f" ({self.kind})"

    def tensors(self, num_layers: int) -> tuple[str, ...]:
        """The names of the tensors that these parts have."""
        convs = [
            f"layers.{layer}.{side}_conv.{name}"
            for layer in range(num_layers if self.conv_group else 0)
            for side in ("attention", "mlp")
            for name in CONV_TENSORS
        ]
        return (*convs, *(SELECTOR_TENSORS if self.selector_rank else ()))

    def details(self) -> list[str]:
        """Lines for the doctor."""
        lines = []
        if self.conv_group:
            lines.append(f"convolutions: 2 taps, groups of {self.conv_group} columns")
        if self.selector_rank:
            lines.append(
                f"selector: rank {self.selector_rank}, among the best {self.selector_top_k} "
                "tokens of every position"
            )
        return lines


def read_parts(block: JsonKeys, has_defaults: bool) -> BlockParts:
    """Reads the parts from their keys: two for the convolutions, two for the selector.

    The two of a part stand together.

    `has_defaults`: the format says what absent keys mean (2 taps, groups of 16, rank 256, 16
    candidates). Without one, a head that calls itself DFlash2 has to have the selector's.

    Raises:
        ConfigError: one key without the other, or what no kernel knows.
    """
    kernel_size = block.integer("conv_kernel_size", 0, MAX_GROUP, 2 if has_defaults else 0)
    group = block.integer("conv_group_size", 0, MAX_GROUP, 16 if has_defaults else 0)
    rank = block.integer("selector_rank", 0, MAX_GROUP, 256 if has_defaults else 0)
    top_k = block.integer("selector_top_k", 0, MAX_GROUP, 16 if has_defaults else 0)
    if bool(kernel_size) != bool(group):
        block.refuse("conv_group_size", "a size beside conv_kernel_size, or neither")
    if bool(rank) != bool(top_k):
        block.refuse("selector_top_k", "a number beside selector_rank, or neither")
    if kernel_size not in (0, 2):
        block.refuse("conv_kernel_size", "2", f"{NO_OTHER} 2")
    if group % 8:
        block.refuse("conv_group_size", "a multiple of 8", f"{NO_OTHER} 16")
    if rank % 8 or rank > MAX_RANK:
        block.refuse("selector_rank", f"a multiple of 8, at most {MAX_RANK}", f"{NO_OTHER} 256")
    if top_k > MAX_CANDIDATES:
        block.refuse("selector_top_k", f"at most {MAX_CANDIDATES}", f"{NO_OTHER} 16")
    architectures = block.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    if rank == 0 and any(isinstance(name, str) and "DFlash2" in name for name in named):
        remedy = "architectures names a DFlash2 head, which has a selector; take the whole config"
        block.refuse("selector_rank", "an integer above 0", remedy)
    if block.number("output_multiplier", 0.0, 1e9, 1.0) != 1.0:
        block.refuse("output_multiplier", "1", "scaled outputs are not supported")
    if block.number("final_logit_softcapping", 0.0, 1e9, 0.0) != 0.0:
        block.refuse("final_logit_softcapping", "null", "capped logits are not supported")
    return BlockParts(group, rank, top_k)
