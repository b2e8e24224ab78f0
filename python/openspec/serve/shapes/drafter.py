"""Bodies of requests that have another draft head draft: ours, SGLang's and vLLM's."""

from __future__ import annotations

from openspec.serve.shapes.chat import Model


class LoadDrafterRequest(Model):
    """POST /v1/drafter/load."""

    path: str
    """Folder of the head, at or below `drafter_dir`; a relative one is taken from there."""
    sha256: str | None = None
    """Of its safetensors file; another file is refused."""
    flush_prefix_cache: bool = False
    """Forget cached prefixes, which hold draft KV of the head before."""
    weight_version: str | None = None
    """A name of your own for the head."""


class UpdateWeightsRequest(Model):
    """POST /update_weights_from_disk, as SGLang has it, for draft heads alone."""

    model_path: str
    """As `path` of /v1/drafter/load."""
    update_draft_model: bool | None = None
    is_draft_model: bool | None = None
    """One of these two must be true: the model's own weights stay."""
    load_format: str | None = None
    """auto or safetensors."""
    weight_version: str | None = None
    flush_cache: bool | None = None
    """As `flush_prefix_cache` of /v1/drafter/load."""
    abort_all_requests: bool | None = None
    """End all requests before. Without it they go on, and their texts do not change."""
    is_async: bool | None = None
    """Not taken: the answer comes when the head drafts."""


class DraftUpdateRequest(Model):
    """POST /update_weights, as vLLM has it, after /start_draft_weight_update."""

    update_info: dict[str, object]
    """`path`, as of /v1/drafter/load."""


class FinishUpdateRequest(Model):
    """POST /finish_weight_update, as vLLM has it; the body may be left out."""

    weight_version: str | None = None
