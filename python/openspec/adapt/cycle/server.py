"""A running server, asked over HTTP: its head, how far that drafts, and another one."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from openspec.errors import ConfigError
from openspec.messages import SpecCounters
from openspec.settings.setting import named

TIMEOUT_S = 120.0  # a head is read from a disk and checked
LOAD, LOAD_TIMEOUT_S = "/load", 2.0


@dataclass(frozen=True)
class ServerConfig:
    """Which server."""

    server: str | None = named(None, "URL")
    """A running server, such as http://127.0.0.1:8000; it takes heads with --drafter-dir."""
    server_admin_key: str | None = named(None, "KEY")
    """The admin key of that server."""

    def opened(self) -> Server | None:
        """The server, if one is named."""
        return None if self.server is None else Server(self.server, self.server_admin_key)


class Server:
    """What is asked of one server."""

    def __init__(self, url: str, admin_key: str | None) -> None:
        self._url, self._key = url.rstrip("/"), admin_key
        self._has_answered = False

    def num_requests(self) -> int:
        """That generate. Once it has answered: none where connections are refused, else one.

        Raises:
            ConfigError: its first answer is no number, or it cannot be reached.
        """
        try:
            found = int(self._asked(LOAD)["server_load"])
            self._has_answered = True
            return found
        except (LookupError, TypeError, ValueError) as error:
            cause = error.__cause__
            reason = cause.reason if isinstance(cause, URLError) else cause
            if self._has_answered:
                return 0 if isinstance(reason, ConnectionRefusedError) else 1
            raise ConfigError(
                f"nobody knows how many requests the server has: {error}; is it openspec, and "
                "--server-admin-key its key?"
            ) from None

    def drafter(self) -> dict[str, Any]:
        """What it drafts with."""
        return self._asked("/v1/drafter")

    def load(self, path: str) -> dict[str, Any]:
        """Exchanges the head for the one in a folder of the server's machine."""
        return self._asked("/v1/drafter/load", {"path": path})

    def rollback(self) -> dict[str, Any]:
        """Goes back to the head before."""
        return self._asked("/v1/drafter/rollback", {})

    def _asked(self, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        where, timeout = f"--server {self._url}", LOAD_TIMEOUT_S if route == LOAD else TIMEOUT_S
        try:
            request = Request(self._url + route, data, headers)
            with urlopen(request, timeout=timeout) as answer:
                found = json.load(answer)
        except HTTPError as error:
            raise ConfigError(f"{where}: {route} answers {error.code}: {_said(error)}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ConfigError(f"{where} does not answer {route}: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{where}: {route} answers no JSON object; is it openspec?")
        return found


def _said(error: HTTPError) -> str:
    """The message of an answer that is an error."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return "an answer that is cut"
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:200]


def counters_of(said: dict[str, Any]) -> SpecCounters:
    """How far the head of an answer of `drafter` has drafted; over all engines of the server."""
    total = SpecCounters()
    for one in said.get("engines", [said]):
        counters = one.get("counters") or {}
        total.num_drafts += counters.get("num_drafts", 0)
        for name in ("num_accepted_tokens_per_pos", "num_drafts_per_pos"):
            _add(getattr(total, name), counters.get(name, []))
    return total


def _add(total: list[int], more: list[int]) -> None:
    total += [0] * (len(more) - len(total))
    for place, number in enumerate(more):
        total[place] += number


def since(before: SpecCounters, after: SpecCounters) -> SpecCounters:
    """What was counted between two answers."""
    changed = SpecCounters(num_drafts=after.num_drafts - before.num_drafts)
    for name in ("num_accepted_tokens_per_pos", "num_drafts_per_pos"):
        minus = [-number for number in getattr(before, name)]
        _add(getattr(changed, name), getattr(after, name))
        _add(getattr(changed, name), minus)
    return changed


def live_length(counters: SpecCounters, num_drafts: int) -> float:
    """Tokens of a step with so many drafts; of steps with fewer, the places that they had."""
    pairs = zip(counters.num_accepted_tokens_per_pos, counters.num_drafts_per_pos, strict=False)
    return 1.0 + sum(right / max(1, drafted) for right, drafted in list(pairs)[:num_drafts])
