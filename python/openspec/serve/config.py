"""ServeConfig: what can be set about the server, beside the engine's own settings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from openspec.config import EngineConfig
from openspec.errors import ConfigError, RequestError
from openspec.settings.setting import check_ranges, named, number
from openspec.text.chat_template import check_kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of the server. A field is a flag; its docstring is the flag's help."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but the loopback address deserves an API key."""
    port: int = number(8000, 0, 65535)
    """Port to listen on; 0 lets the system pick one, which the log names."""
    uds: str | None = named(None, "PATH")
    """Unix domain socket to listen on instead of host and port."""
    api_key: list[str] | None = field(default=None, repr=False)
    """Keys that clients may send as "Authorization: Bearer KEY", separated by commas. Better set
    through OPENSPEC_API_KEY than on the command line, which other users can see."""
    admin_api_key: str | None = field(default=None, repr=False)
    """Key for /flush_cache, aborting all requests and draft heads. Default: the API keys."""
    served_model_name: list[str] | None = field(default=None, metadata={"words": True})
    """Names the model answers to, separated by commas or spaces; answers carry the first. Default:
    the folder's name and the path as given."""
    generation_config: Literal["auto", "openspec"] = "auto"
    """Sampling defaults for requests that leave them out. auto: the model's
    generation_config.json; openspec: temperature 1 and no filter."""
    chat_template: str | None = named(None, "FILE")
    """File with a Jinja chat template, used in place of the model's own."""
    default_chat_template_kwargs: dict[str, bool | str] = field(default_factory=dict)
    """What chat templates are told where a request does not say, such as {"enable_thinking":
    false}: the model thinks only when asked to."""
    template_date: str | None = named(None, "YYYY-MM-DD")
    """Date that chat templates are told where they ask for today's. Default: the
    day the server starts; it stays until the server ends, so that prompts stay the same."""
    default_max_tokens: int | None = number(None, 1, 2**31 - 1)
    """Most tokens of an answer to a chat that names no limit, in every API. Default: what the
    context leaves, and 1024 for the embedded model."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "qwen3_coder"] = "auto"
    """Form of the tool calls that the model writes. auto: the one that its chat template shows, or
    hermes."""
    reasoning_parser: Literal["auto", "qwen3", "deepseek_r1"] = "auto"
    """Form of the model's thinking, which answers carry apart from their text. qwen3: between
    <think> and </think>; deepseek_r1: the same, and an answer begins with it even where its first
    tag is missing. auto: deepseek_r1 for templates of DeepSeek's, else qwen3."""
    reasoning_field: Literal["both", "reasoning", "reasoning_content"] = "both"
    """Name of the thinking in answers of /v1/chat/completions. Clients read one or the other; one
    that reads both shows it twice."""
    max_num_queued_reqs: int | None = number(1024, 0, 1 << 20)
    """Sequences that may wait beyond max_num_seqs; further requests get 503 and Retry-After."""
    max_num_queued_tokens: int | None = number(4 * 1024 * 1024, 0, 1 << 32)
    """Prompt tokens that may wait beyond those that the KV pages hold, a prompt counted once for
    all its completions; further requests get 503 and Retry-After."""
    max_body_bytes: int = number(8 * 1024 * 1024, 1024, 1 << 30, is_bytes=True)
    """Largest request body."""
    request_timeout_s: float = number(60.0, 0.1, 3600)
    """Seconds a client may take to send its request, or take nothing of its answer."""
    drain_grace_s: float = number(0.0, 0, 3600)
    """After SIGTERM, keep accepting new requests for so long: load balancers lag behind /ready."""
    shutdown_timeout: float = number(30.0, 0, 86400)
    """After SIGTERM, seconds that running requests may take before they end with "abort"."""
    replicas: int | None = number(None, 1, 1024)
    """Engines, each a process with the whole model; requests go to the one that has most of their
    prompt cached, unless it is busier than the others. Default: as many as `devices`, or 1."""
    devices: list[str] | None = None
    """GPUs of the engines, in turn: indices among those that this process sees, or UUIDs of GPUs or
    MIG devices, separated by commas. With tensor_parallel_size each engine gets as many, which
    NVLinks connect. Default: the first ones."""
    min_replicas: int | None = number(None, 1, 1024)
    """Engines without which the server neither starts nor is ready. Default: all at the start, one
    from then on."""
    watchdog_timeout: float = number(60.0, 0, 86400)
    """Seconds that a step may take beside what its tokens justify before the engine counts as hung
    and is ended; 0: any time."""
    restart_engine: int = number(5, 0, 1 << 20)
    """How often within 10 minutes an engine that died or hung is started again; when it ends once
    more and no other engine is left, the server ends with status 1. 0: never, and the server stays
    without one."""
    capture_dir: str | None = named(None, "DIR")
    """Folder in which prompts and answers are kept as token ids, for a draft head to learn from
    (python -m openspec.adapt train --records DIR). Token ids are text for whoever has the
    tokenizer. Requests with "store": false, "capture": false or X-OpenSpec-Capture: 0 are not kept.
    Default: nothing is."""
    capture_share: float = number(1.0, 0.0, 1.0)
    """Share of the requests that is kept."""
    capture_rate: float = number(20000.0, 1.0, 1e9)
    """Tokens a second that are kept at most; further texts are dropped and counted."""
    capture_keys: list[str] | None = field(default=None, repr=False)
    """Of api_key, those whose requests are kept. Default: all of them."""
    capture_max_bytes: int = number(256 * 1024 * 1024, 1024 * 1024, 1 << 40, is_bytes=True)
    """Most bytes of capture_dir, four for each token; the oldest go first."""
    capture_ttl_s: float = number(7 * 86400.0, 1.0, 1e9)
    """Seconds that they are kept at most."""
    grammar_timeout_s: float = number(10.0, 0.1, 600)
    """Seconds of processor time that compiling the grammar of one request may take: of a schema, a
    pattern, tools."""
    allowed_origins: list[str] | None = None
    """Web origins that may call the server (CORS), separated by commas. Default: none."""
    pages: bool = True
    """Serve two pages: /ui, to ask questions on, which shows what speculation does; and /docs, to
    try requests on, with /openapi.json."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much to log."""
    access_log: bool = False
    """Log a line for every request, with the path that was asked for."""

    @property
    def template_time(self) -> datetime | None:
        """`template_date` as a time."""
        return None if self.template_date is None else datetime.fromisoformat(self.template_date)

    def check(self) -> None:
        """Checks what can be checked without the engine.

        Raises:
            ConfigError: with the setting, its value and what is allowed.
        """
        check_ranges(self)
        if self.template_date is not None and not is_date(self.template_date):
            raise ConfigError(
                f"template_date: expected YYYY-MM-DD, such as 2026-01-31, found "
                f"{self.template_date!r}"
            )
        try:
            check_kwargs(self.default_chat_template_kwargs)
        except RequestError as error:
            raise ConfigError(f"default_{error}") from None
        # An empty variable is what a secret that is missing leaves behind: no reason to be open.
        if self.api_key is not None and not self.api_key:
            raise ConfigError("api_key is given but holds no key; give one, or leave it out")
        if self.admin_api_key == "":
            raise ConfigError("admin_api_key is given but empty; give a key, or leave it out")
        for key in [*(self.api_key or []), *([self.admin_api_key] if self.admin_api_key else [])]:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError("an API key must be printable ASCII without spaces")
        keys = self.capture_keys
        if keys is not None and not (keys and {*keys} <= {*(self.api_key or [])}):
            raise ConfigError("capture_keys must be some of api_key, or leave it out")
        if not self.host:
            raise ConfigError("host must not be empty; 0.0.0.0 listens on every address")


def check_drafter_access(config: ServeConfig, engine_config: EngineConfig) -> None:
    """Refuses draft heads that whoever reaches the server could replace.

    Raises:
        ConfigError: with the remedy.
    """
    is_local = config.uds is not None or config.host in ("localhost", "127.0.0.1", "::1")
    if engine_config.drafter_dir is not None and not is_local and config.admin_api_key is None:
        raise ConfigError(
            f"drafter_dir with host {config.host} needs --admin-api-key, or any client could "
            "replace the draft head"
        )


def is_date(text: str) -> bool:
    """Whether a text is a day in the form YYYY-MM-DD."""
    if re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", text) is None:
        return False
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True
