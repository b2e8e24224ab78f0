"""The errors that openspec raises on purpose: three that users see, one for the engine."""

from __future__ import annotations

import importlib.util
import re
import resource

MAX_MESSAGE_CHARS = 2000


def cut(message: str) -> str:
    """At most MAX_MESSAGE_CHARS of it: the middle goes, for the remedy stands at the end."""
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    end = MAX_MESSAGE_CHARS // 4
    return f"{message[: MAX_MESSAGE_CHARS - end - 5]} ... {message[-end:]}"


_EXPECTED = re.compile(r"Expected `([^`]+)`, got `[^`]+`")
_PLACE = re.compile(r" - at (`key` in )?`\$\.?([^`]*)`$")
_KINDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "an object",
    "str": "a string",
}


def wrong_type(error: Exception) -> str:
    """What msgspec says of a value of the wrong type, in the words of settings and requests."""
    said = str(error)
    place = _PLACE.search(said)
    where = "it" if place is None else place[2].replace("[...]", "every value") or "it"
    if place is not None:
        said = said[: place.start()]
        where = f"every key of {where}" if place[1] else where
    found = _EXPECTED.fullmatch(said)
    if found is None:
        return said if place is None else f"{where}: {said}"
    kinds = [_KINDS.get(kind, kind) for kind in found[1].split(" | ") if kind != "null"]
    return f"{where} must be {' or '.join(kinds)}"


class _Said(Exception):
    """An error whose message is for people, and not longer than they read."""

    def __init__(self, message: str) -> None:
        super().__init__(cut(message))


class ConfigError(_Said, ValueError):
    """A setting, checkpoint or combination that cannot work; the message names the remedy.

    Ends start-up with one line and a non-zero exit status.
    """


def check_is_built() -> None:
    """Refuses to start from a clone that is not built; whether the extension loads is not tried.

    Raises:
        ConfigError: there is no extension.
    """
    if importlib.util.find_spec("openspec._C") is None:
        raise ConfigError("the extension is not built: run `pip install .` or `tests/run cpp`")


class RequestError(_Said, ValueError):
    """A request that cannot be served as asked; HTTP 400 in the OpenAI error shape."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class EngineError(_Said, RuntimeError):
    """A broken invariant, or an engine that is gone. HTTP 500 or 503.

    `code` says for a machine what failed: engine_hung, engine_dead, engine_late, engine_restarting
    or text_process_ended.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


def out_of_memory(error: BaseException | None) -> str | None:
    """What to say of an error that comes from too little memory; None of any other."""
    while error is not None:
        # The second is what the linker says of a library that finds no room.
        if isinstance(error, MemoryError) or "failed to map segment" in str(error):
            most = resource.getrlimit(resource.RLIMIT_AS)[0]
            limit = "" if most == resource.RLIM_INFINITY else f" of {most} bytes (ulimit -v)"
            return (
                f"out of memory: the process does not fit into its address space{limit}; raise "
                "the limit, lower --kv-cache-memory or take a smaller model"
            )
        error = error.__cause__ or error.__context__
    return None


class OutOfPages(Exception):
    """A step needs more KV pages than are free; nothing has changed."""
