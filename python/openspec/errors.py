"""The errors that openspec raises on purpose: three that users see, one for the engine."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting, checkpoint or combination that cannot work; the message names the remedy.

    Ends start-up with one line and a non-zero exit status.
    """


class RequestError(ValueError):
    """A request that cannot be served as asked; HTTP 400 in the OpenAI error shape."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineError(RuntimeError):
    """A broken invariant, or an engine that is gone. HTTP 500 or 503.

    `code` says for a machine what became of the engine: engine_hung or engine_dead.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class OutOfPages(Exception):
    """A step needs more KV pages than are free; nothing has changed."""
