"""What a drafter says about itself, its options among it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from openspec.checkpoint.draft_head import CAPTURE_LAYERS, listed
from openspec.errors import ConfigError
from openspec.settings.names import nearest
from openspec.settings.setting import EXPECTED

if TYPE_CHECKING:
    from openspec import _C
    from openspec.checkpoint.targets.config import ModelConfig
    from openspec.checkpoint.weights import DraftModel

OptionValue: TypeAlias = int | float | bool | str
Options: TypeAlias = Mapping[str, OptionValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOption:
    """One setting of a drafter. Its type is the type of `default`."""

    name: str
    """As `--method-option name=value` has it, and the key that C++ receives."""
    default: OptionValue
    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    """Names of the same thing in vLLM's speculative config."""

    def check(self, value: OptionValue) -> OptionValue:
        """Returns the value in the option's type; a text may spell it.

        Raises:
            ConfigError: with the option, the value and what is allowed.
        """
        wanted = type(self.default)
        try:
            value = msgspec.convert(value, wanted, strict=not isinstance(value, str))
        except msgspec.ValidationError:
            raise ConfigError(f"{self.name} expects {EXPECTED[wanted]}; got {value!r}") from None
        if self.choices and value not in self.choices:
            raise ConfigError(
                f"{self.name} must be one of {', '.join(self.choices)}; got {value!r}"
            )
        if isinstance(value, (int, float)):
            if self.minimum is not None and not value >= self.minimum:
                raise ConfigError(f"{self.name} must be at least {self.minimum}, got {value}")
            if self.maximum is not None and not value <= self.maximum:
                raise ConfigError(f"{self.name} must be at most {self.maximum}, got {value}")
        return value


DRAFT_TOP_K = "draft_top_k"
"""The option that makes trees."""
DRAFT_TREE_SIZE = "draft_tree_size"
DRAFT_NOISE = "draft_noise"
DRAFT_WINDOW = "draft_window"
SUGGESTED_WINDOW = 256
"""Tokens of `draft_window` for texts longer than the head's training."""
MAX_ONE_PASS_TREE_SIZE = 256


def noise_option() -> DrafterOption:
    """How a head draws drafts of sampled requests."""
    return DrafterOption(
        name=DRAFT_NOISE,
        default=True,
        help="Draw the drafts of sampled requests with the noise that the target's choice will "
        "be drawn with (with --acceptance rejection: with noise of their own); off: always the "
        "head's best.",
    )


def window_option() -> DrafterOption:
    """How much of the context a head sees."""
    return DrafterOption(
        name=DRAFT_WINDOW,
        default=0,
        minimum=0,
        maximum=1 << 24,
        help="Tokens of the context that the head attends to, the last ones; 0: all. For texts "
        "far longer than those that it was trained on.",
    )


def head_options(
    *, max_top_k: int, top_k_help: str, max_tree_size: int, tree_size_help: str
) -> tuple[DrafterOption, ...]:
    """The options that every head has."""
    return (
        DrafterOption(
            name=CAPTURE_LAYERS,
            default="",
            help="Layers of the target, from 0, whose outputs the head reads, such as 1,17,32. "
            "Default: what the head's config.json says.",
        ),
        noise_option(),
        window_option(),
        DrafterOption(name=DRAFT_TOP_K, default=1, minimum=1, maximum=max_top_k, help=top_k_help),
        DrafterOption(
            name=DRAFT_TREE_SIZE,
            default=0,
            minimum=0,
            maximum=max_tree_size,
            help=f"Drafts of a tree, the most likely ones. Default: {tree_size_help}.",
        ),
    )


def one_pass_options() -> tuple[DrafterOption, ...]:
    """The options of a head that drafts all depths in one pass."""
    return head_options(
        max_top_k=64,
        top_k_help="Above 1 a tree is drafted from the best so many tokens of every position.",
        max_tree_size=MAX_ONE_PASS_TREE_SIZE,
        tree_size_help="K, at least 15",
    )


def num_one_pass_nodes(depth: int, options: Options) -> int:
    """Nodes of the tree that a head grows from one pass over `depth` positions."""
    num_nodes, level = 0, 1
    for _ in range(depth):
        level = min(level * int(options[DRAFT_TOP_K]), MAX_ONE_PASS_TREE_SIZE)
        num_nodes += level
    wanted = int(options[DRAFT_TREE_SIZE]) or max(depth, 15)
    return min(wanted, num_nodes, MAX_ONE_PASS_TREE_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A way of running the same checkpoint that may turn out to be the right one."""

    label: str
    options: Options
    """Of the method, or `num_speculative_tokens`; over the configured ones."""
    advice: str
    """What to do if its drafts are accepted further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """What the drafter reaches where all is well, and what may be wrong where it does not.

    Acceptance counts for each draft position the share of drafts that were accepted there.
    """

    usual: tuple[float, ...]
    """Acceptance per position on ordinary text."""
    source: str
    """Where these figures are from."""
    least_first: float
    """Acceptance at the first position below which something is wrong."""
    variants: tuple[Variant, ...] = ()
    causes: tuple[str, ...] = ()
    """What else lowers acceptance without an error, the likeliest first."""


HEAD_CAUSES = (
    "the head was trained for another target of the same size (base against instruct, 2504 against "
    "2507), or for its quantised form",
    "the head expects other layers; its card or training configuration names them "
    "(--method-option capture_layers=... takes outputs, counted from 0)",
    "the head was trained on normed states; it has to read the residual stream as it is",
)
"""What may be wrong with any head on the target's states."""


def layer_variants(model: DraftModel, target: ModelConfig) -> tuple[Variant, ...]:
    """The head with its layer ids read in the other numbering."""
    layers = model.head.capture_layers
    variants = []
    for moved in ([layer - 1 for layer in layers], [layer + 1 for layer in layers]):
        if moved[0] >= 0 and moved[-1] < target.num_layers:
            text = ",".join(map(str, moved))
            variants.append(
                Variant(
                    label=f"outputs of layers {listed(moved)}",
                    options={CAPTURE_LAYERS: text},
                    advice="the layer ids are in the other numbering: "
                    f"use --method-option {CAPTURE_LAYERS}={text} or mend config.json",
                )
            )
    return tuple(variants)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSetup:
    """What a drafter may know of the engine's configuration."""

    spec: DrafterSpec
    target: ModelConfig
    target_folder: Path
    folder: Path | None
    """Of the draft checkpoint, if one was given or came with the model."""
    num_speculative_tokens: int | None
    """K as it was given."""
    options: Options
    """Of the method, complete."""
    acceptance: str

    @property
    def draft_depth(self) -> int:
        """K, the default filled in, for which the draft checkpoint may have to be opened."""
        return self.spec.draft_depth(self.num_speculative_tokens, self.folder, self.options)

    @property
    def max_draft_tokens(self) -> int:
        """Drafts per sequence and step: K, or as many as a tree of depth K has."""
        return self.spec.max_draft_tokens(self.draft_depth, self.options)

    @property
    def draft_folder(self) -> Path:
        """The draft checkpoint's folder, which `DrafterSpec.validate` has found to be there."""
        assert self.folder is not None
        return self.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSpec:
    """What a drafter says about itself to the rest of the engine."""

    name: str
    summary: str
    """One line for `--help`."""
    example: tuple[str, str] | None = None
    """A model of the hub and a draft model made for it, for `--help`."""
    default_num_speculative_tokens: int
    max_num_speculative_tokens: int
    """0: this is plain decoding."""
    options: tuple[DrafterOption, ...] = ()
    aliases: tuple[str, ...] = ()
    """Other names of the method in vLLM's speculative config."""
    is_default: bool = False
    target_prefix: str = ""
    """Start of the names of its draft model's tensors, if that comes in the target's own files."""
    copies_text: bool = False
    """Whether its drafts are copied from the text so far, as those beside any other drafter are."""
    supports_rejection: bool = False
    """Whether it knows the probabilities of its drafts, which acceptance by rejection needs."""
    read_draft_model: Callable[[DraftSetup], DraftModel] | None = None
    """Checks the draft checkpoint against the target, loads nothing; raises ConfigError with the
    remedy. None: the method has no draft model."""
    plan_checkup: Callable[[DraftSetup], Checkup] | None = None
    """For `python -m openspec.doctor`."""
    adjust_defaults: Callable[[Options, dict[str, OptionValue]], None] | None = None
    """Fits defaults (second argument, by name) to the options that were given (first)."""
    check: Callable[[DraftSetup], None] | None = None
    """Crosses the drafter's needs with the configuration; raises ConfigError with the remedy."""
    num_drafts_of: Callable[[Path, Options], int] | None = None
    """K by default where it depends on the draft checkpoint, from its folder and the completed
    options; raises ConfigError if there is none in it."""
    num_tree_drafts: Callable[[int, Options], int] | None = None
    """Drafts of a tree, from its depth K and the completed options, where draft_top_k is above 1.
    None: it makes no trees."""
    build: Callable[[int, Options], _C.Drafter] | None = None
    """Makes a drafter written in Python, from K and the options. None: it is compiled in."""

    @property
    def needs_draft_model(self) -> bool:
        """Whether there is a draft checkpoint to give."""
        return self.read_draft_model is not None

    @property
    def options_by_name(self) -> dict[str, DrafterOption]:
        """The options by their own names and their aliases."""
        return {name: option for option in self.options for name in (option.name, *option.aliases)}

    def complete_options(self, given: Options) -> dict[str, OptionValue]:
        """Options by their own names, checked, defaults filled in.

        Raises:
            ConfigError: for an unknown name or a value out of range.
        """
        by_name = self.options_by_name
        checked: dict[str, OptionValue] = {}
        for name, value in given.items():
            if name not in by_name:
                known = ", ".join(option.name for option in self.options) or "none"
                raise ConfigError(
                    f"method {self.name!r} has no option {name!r}{nearest(name, by_name)}; "
                    f"its options: {known}"
                )
            checked[by_name[name].name] = by_name[name].check(value)
        defaults = {option.name: option.default for option in self.options}
        if self.adjust_defaults is not None:
            self.adjust_defaults(checked, defaults)
        return {**defaults, **checked}

    def draft_depth(self, given: int | None, folder: Path | None, options: Options) -> int:
        """K: as given, else the draft checkpoint's or the method's own."""
        if given is not None:
            return given
        if self.num_drafts_of is not None and folder is not None:
            return self.num_drafts_of(folder, options)
        return self.default_num_speculative_tokens

    def max_draft_tokens(self, depth: int, options: Options) -> int:
        """Drafts of a sequence and step: K one after another, or a tree of depth K."""
        if self.num_tree_drafts is None or depth == 0 or options[DRAFT_TOP_K] == 1:
            return depth
        return self.num_tree_drafts(depth, options)

    def validate(self, setup: DraftSetup) -> None:
        """Refuses what cannot work with this drafter.

        Raises:
            ConfigError: with the remedy.
        """
        num_drafts = setup.num_speculative_tokens
        if num_drafts is not None and not 0 <= num_drafts <= self.max_num_speculative_tokens:
            raise ConfigError(
                f"num_speculative_tokens must be in [0, {self.max_num_speculative_tokens}] "
                f"for method {self.name!r}, got {num_drafts}"
            )
        if self.needs_draft_model and setup.folder is None:
            raise ConfigError(
                f"method {self.name!r} needs --draft-model DIR, or a folder "
                f"{setup.target_folder / self.name} beside the model's files"
            )
        if not self.needs_draft_model and setup.folder is not None:
            raise ConfigError(f"method {self.name!r} takes no draft model; drop --draft-model")
        if self.check is not None:
            self.check(setup)


def check_head_options(setup: DraftSetup) -> None:
    """Refuses trees that cannot be, and what goes with no trees or no acceptance by rejection.

    Raises:
        ConfigError: with the remedy.
    """
    top_k, tree_size = setup.options[DRAFT_TOP_K], setup.options[DRAFT_TREE_SIZE]
    if setup.acceptance == "rejection" and top_k != 1:
        raise ConfigError(
            f"--acceptance rejection is for chains: drop it, or {DRAFT_TOP_K}={top_k}"
        )
    if setup.acceptance == "rejection" and not setup.options[DRAFT_NOISE]:
        raise ConfigError(
            f"--acceptance rejection needs drafts that are drawn: drop it, or {DRAFT_NOISE}=false"
        )
    if top_k == 1:
        if tree_size != 0:
            raise ConfigError(
                f"{DRAFT_TREE_SIZE} is for trees: set {DRAFT_TOP_K} above 1 (such as 4)"
            )
    elif 0 < setup.draft_depth > setup.max_draft_tokens:
        raise ConfigError(
            f"{DRAFT_TREE_SIZE}={tree_size} is less than the tree's depth; raise it or lower "
            f"--num-speculative-tokens ({setup.draft_depth})"
        )
