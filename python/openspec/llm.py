"""LLM: generation without a server, in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from openspec.sampling_params import SamplingParams
from openspec.settings import Raw

if TYPE_CHECKING:
    from openspec.outputs import RequestOutput


class LLM:
    """A model and an engine of its own.

    Keyword arguments are the fields of `EngineConfig`, the options of the method, and
    `speculative_config` (a mapping, as vLLM takes it).
    """

    def __init__(self, model: str | None = None, **settings: Raw) -> None:
        raise NotImplementedError

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes prompts (texts or token ids), batched; results in the order of the prompts.

        Raises:
            RequestError: for a request that cannot be served; nothing has run then.
        """
        raise NotImplementedError

    def chat(
        self,
        messages: Sequence[Mapping[str, object]] | Sequence[Sequence[Mapping[str, object]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, through the model's chat template."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees the model."""
