"""The JSON file of a benchmark as it is read again. Files of earlier versions lack some fields."""

from __future__ import annotations

from pathlib import Path

import msgspec

from openspec.errors import ConfigError


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one workload at one concurrency. Times are in milliseconds."""

    method: str
    workload: str
    concurrency: int
    output_tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    ttft_ms_p99: float
    tpot_ms_p99: float
    num_requests: int
    num_identical_to_plain: int
    identical_to_plain: bool
    output_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_forced_tokens: int = 0
    """Of the draft tokens those that a grammar left no choice of."""
    num_accepted_forced_tokens: int = 0
    num_copied_tokens: int = 0
    """Of the draft tokens those copied from the text so far; the rest are the method's."""
    num_accepted_copied_tokens: int = 0
    chunk_gap_ms: float | None = None
    chunk_gap_ms_p99: float | None = None
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    acceptance_per_position: list[float] = []
    """Of the drafts that reached each position; of all drafts without `num_drafts_per_pos`."""
    num_drafts_per_pos: list[int] = []
    """Drafts that reached each position; files of earlier versions lack them."""
    ttft_ms_percentiles: dict[str, float] = {}
    tpot_ms_percentiles: dict[str, float] = {}
    output_tokens_per_s_repeats: list[float] = []
    speedup: float | None = None
    """Over plain decoding; None for plain decoding itself, and for other engines' servers."""
    speedup_range: list[float] = []
    may_differ: bool = False
    """Another engine: its texts need not equal plain decoding's."""
    draft_tokens_per_step: float | None = None
    """Of a sequence: what the row budget chose, on average."""
    steps_with_drafts: float | None = None
    """A share."""
    answers: list[str] = []
    """A digest of each answer's text, in the order of the prompts."""

    @property
    def is_shown(self) -> bool:
        """Whether the speed may be shown."""
        return self.identical_to_plain or self.may_differ

    @property
    def has_sources(self) -> bool:
        """Whether drafts came from elsewhere than the method, too."""
        return self.num_forced_tokens + self.num_copied_tokens > 0

    @property
    def is_clear(self) -> bool:
        """Whether all turns agree on who is faster."""
        return not self.speedup_range or not min(self.speedup_range) < 1 < max(self.speedup_range)

    @property
    def cell(self) -> tuple[str, int]:
        """Workload and concurrency."""
        return self.workload, self.concurrency


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A whole benchmark."""

    environment: dict[str, object]
    runs: list[Run]
    name: str = ""
    """The file's, for people; not in it."""

    @property
    def flags(self) -> dict[str, object]:
        """What the benchmark was asked for."""
        return section(self.environment, "flags")

    @property
    def server(self) -> dict[str, object]:
        """What the server told of itself."""
        return section(self.environment, "server")

    @property
    def plain(self) -> str:
        """The method that the others are compared with."""
        return self.runs[0].method


def as_document(content: dict[str, object]) -> Document:
    """What is about to be written to a file, as it will be read."""
    return msgspec.json.decode(msgspec.json.encode(content), type=Document)


def section(of: dict[str, object], name: str) -> dict[str, object]:
    """A mapping in a mapping; empty if it is something else."""
    found = of.get(name)
    return found if isinstance(found, dict) else {}


def read_document(path: Path) -> Document:
    """Reads a file of `--json`.

    Raises:
        ConfigError: it cannot be read, or is something else.
    """
    try:
        document = msgspec.json.decode(path.read_bytes(), type=Document)
    except OSError as error:
        raise ConfigError(f"compare: {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"compare: {path} is not from python -m openspec.bench --json: {error}"
        ) from None
    if not document.runs:
        raise ConfigError(f"compare: {path} has no runs")
    return msgspec.structs.replace(document, name=path.stem)
