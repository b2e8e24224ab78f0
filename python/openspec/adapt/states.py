"""`python -m openspec.adapt states`: hidden states over HTTP, for other programs that train heads.

    python -m openspec.adapt states --model DIR --hidden-states-dir DIR

Answers what speculators' trainer asks of an engine, so that it runs against openspec unchanged: the
states of each token of a text, as safetensors in a folder that both see. It is a process of its own
with an engine of its own; nothing that serves is slower for it. Answers go to this machine alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save

from openspec.adapt.replay import Replay
from openspec.adapt.target import answering_config
from openspec.checkpoint.draft_head import captured_layers, layers_of_user
from openspec.config import EngineConfig
from openspec.errors import ConfigError, RequestError, wrong_type
from openspec.llm import LLM
from openspec.settings.setting import named, number

logger = logging.getLogger(__name__)

UNREAD_S = 600.0
"""A file that nobody has taken for so long goes."""
MAX_BODY_BYTES = 64 << 20
SUFFIX, LOCK = ".safetensors", ".lock"


@dataclass(frozen=True)
class StatesConfig:
    """Settings of the answers."""

    hidden_states_dir: str | None = named(None, "DIR")
    """Folder of the files, which the other program reads and removes."""
    hidden_state_layers: str | None = named(None, "N,N,...")
    """Layers whose inputs are read, from 0, rising, as vLLM counts them; the output of the last one
    always follows. Default: 2, n/2 and n-3 of n layers."""
    hidden_states_bytes: int = number(8 << 30, 1 << 20, 1 << 50, is_bytes=True)
    """Most bytes of files that are not yet taken; further texts get 503."""
    port: int = number(8000, 0, 65535)
    """Port on 127.0.0.1; 0: any."""


class Completion(msgspec.Struct):
    """What is read of a body of /v1/completions."""

    prompt: list[int]


class Chat(msgspec.Struct):
    """What is read of a body with messages."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Full(Exception):
    """Files that nobody has taken leave no room."""


class Store:
    """The folder, and how much of it is not yet taken."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Makes the folder, for this user alone.

        Raises:
            ConfigError: it cannot be made.
        """
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--hidden-states-dir {folder}: {error.strerror}") from None
        self._folder, self._max_bytes = folder.absolute(), max_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many more fit, once what nobody took is gone."""
        kept = 0
        for path in self._folder.glob(f"*{SUFFIX}"):
            try:
                found = path.stat()
            except OSError:  # it has just been taken
                continue
            if time.time() - found.st_mtime > UNREAD_S:
                path.unlink(missing_ok=True)
                Path(f"{path}{LOCK}").unlink(missing_ok=True)
            else:
                kept += found.st_size
        return kept + num_bytes <= self._max_bytes

    def write(self, data: bytes) -> str:
        """A whole file, and beside it the lock that readers wait for, which nobody holds."""
        path = self._folder / f"{uuid.uuid4().hex}{SUFFIX}"
        for name, content in ((str(path), data), (f"{path}{LOCK}", b"")):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(name, flags, 0o600), "wb") as file:
                file.write(content)
        return str(path)


class States:
    """An engine that computes states and answers nothing else."""

    def __init__(self, llm: LLM, own: StatesConfig) -> None:
        """Reads the settings.

        Raises:
            ConfigError: layers that are not there, or a folder that cannot be.
        """
        if own.hidden_states_dir is None:
            raise ConfigError("--hidden-states-dir is needed")
        count = llm.model_config.num_layers
        given = layers_of_user(own.hidden_state_layers or f"2,{count // 2},{count - 3}")
        assert given is not None
        named_so = dataclasses.replace(given, numbering="entering", origin="--hidden-state-layers")
        outputs = (*captured_layers(named_so, count), count - 1)
        layers = sorted(set(outputs))
        self._places = [layers.index(layer) for layer in outputs]
        self._replay = Replay(llm, layers, torch.empty(0, dtype=torch.bfloat16))
        self._most, self._width = llm.engine.info.max_model_len, llm.model_config.hidden_size
        self._store = Store(Path(own.hidden_states_dir), own.hidden_states_bytes)
        self._lock = threading.Lock()
        self.llm, self.name = llm, str(llm.model_config.folder)

    def file_of(self, tokens: list[int]) -> str:
        """Where the states of a text are, [tokens, layers, hidden].

        Raises:
            RequestError: the text is too long, or has tokens that the model does not know.
            Full: there is no room.
        """
        if not 0 < len(tokens) <= self._most:
            raise RequestError(f"prompt: {len(tokens)} tokens, expected 1 to {self._most}")
        self.llm.tokenizer.check_token_ids(tokens)
        with self._lock:
            if not self._store.has_room(2 * len(tokens) * len(self._places) * self._width):
                raise Full
            states = self._replay.texts([tokens])[0].unflatten(-1, (-1, self._width))
            tensors = {
                "token_ids": torch.tensor(tokens),
                "hidden_states": states[:, self._places].contiguous(),
            }
            return self._store.write(save(tensors))

    def completion(self, body: bytes) -> dict[str, Any]:
        """Of ids, /v1/completions."""
        asked = msgspec.json.decode(body, type=Completion)
        path = self.file_of(asked.prompt)
        choice = {"text": "", "prompt_token_ids": asked.prompt, **_CHOICE}
        return {**self._answer("text_completion", asked.prompt, path), "choices": [choice]}

    def chat(self, body: bytes) -> dict[str, Any]:
        """Of messages, /v1/chat/completions."""
        tokens = self._rendered(body)
        path = self.file_of(tokens)
        choice = {"message": {"role": "assistant", "content": ""}, **_CHOICE}
        answer = {"prompt_token_ids": tokens, "choices": [choice]}
        return {**self._answer("chat.completion", tokens, path), **answer}

    def render(self, body: bytes) -> dict[str, Any]:
        """The ids of messages, /v1/chat/completions/render."""
        return {"token_ids": self._rendered(body)}

    def _rendered(self, body: bytes) -> list[int]:
        asked = msgspec.json.decode(body, type=Chat)
        if asked.continue_final_message:
            raise RequestError("continue_final_message: turns are closed here; drop it")
        kwargs = asked.chat_template_kwargs or {}
        prompt = self.llm.tokenizer.render_chat(
            asked.messages, asked.tools, asked.add_generation_prompt, kwargs
        )
        return prompt.token_ids

    def _answer(self, kind: str, tokens: Sequence[int], path: str) -> dict[str, Any]:
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 0, "total_tokens": len(tokens)}
        return {
            "id": f"states-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
            "usage": usage,
            "kv_transfer_params": {"hidden_states_path": path},
        }

    def models(self) -> dict[str, Any]:
        """The one model, /v1/models."""
        model = {"id": self.name, "object": "model", "owned_by": "openspec"}
        return {"object": "list", "data": [{**model, "max_model_len": self._most}]}


_CHOICE: dict[str, Any] = {"index": 0, "finish_reason": "length", "logprobs": None}


class Handler(BaseHTTPRequestHandler):
    """One connection of a trainer."""

    protocol_version = "HTTP/1.1"
    states: States

    def do_GET(self) -> None:
        """Which model it is."""
        if self.path == "/v1/models":
            self._send(200, self.states.models())
        else:
            self._refuse(404, f"{self.path}: there are /v1/models and {', '.join(ROUTES)}")

    def do_POST(self) -> None:
        """The states of one text."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            self._refuse(413, f"expected a body of at most {MAX_BODY_BYTES} bytes with its length")
            return
        body, route = self.rfile.read(int(length)), ROUTES.get(self.path)
        if route is None:
            self._refuse(404, f"{self.path}: there are /v1/models and {', '.join(ROUTES)}")
            return
        try:
            answer = route(self.states, body)
        except msgspec.DecodeError as error:
            self._refuse(400, wrong_type(error))
        except RequestError as error:
            self._refuse(400, str(error))
        except Full:
            self._refuse(503, "files that nobody has taken fill --hidden-states-bytes")
        else:
            self._send(200, answer)

    def _refuse(self, status: int, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "code": status}
        self._send(status, {"error": error})

    def _send(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged."""


ROUTES: dict[str, Callable[[States, bytes], dict[str, Any]]] = {
    "/v1/completions": States.completion,
    "/v1/chat/completions": States.chat,
    "/v1/chat/completions/render": States.render,
}


def serve(config: EngineConfig, own: StatesConfig) -> str:
    """Answers until it is interrupted.

    Raises:
        ConfigError: the target, a layer, the folder or the port cannot be used.
    """
    config = config.with_folders()
    with LLM(**dataclasses.asdict(answering_config(config))) as llm:
        handler = type("Handler", (Handler,), {"states": States(llm, own)})
        try:
            server = ThreadingHTTPServer(("127.0.0.1", own.port), handler)
        except OSError as error:
            raise ConfigError(f"--port {own.port}: {error.strerror}; name another") from None
        server.daemon_threads = True
        logger.info("http://127.0.0.1:%d/v1", server.server_port)
        with server, contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return "ended"
