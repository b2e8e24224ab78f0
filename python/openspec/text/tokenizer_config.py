"""What stands beside tokenizer.json: named and added tokens, and chat templates."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from openspec.checkpoint.folder import find_file
from openspec.checkpoint.strict_json import JsonValue, describe_value
from openspec.errors import ConfigError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
SOURCE = "tokenizer_config.json"
_CONTROL = re.compile("<\uff5c[^\uff5c]+\uff5c>")


def tokenizer_file(root: Path) -> Path:
    """The folder's tokenizer.json.

    Raises:
        ConfigError: there is none, with the remedy.
    """
    file = find_file(root, "tokenizer.json")
    if file is not None:
        return file
    if find_file(root, "tekken.json") is not None:
        raise ConfigError(
            f"{root} has tekken.json but no tokenizer.json, the only form that openspec reads; add "
            "the tokenizer.json and tokenizer_config.json of the model's Hugging Face form"
        )
    has_pieces = " has tokenizer.model but" if find_file(root, "tokenizer.model") else " has"
    raise ConfigError(
        f"{root}{has_pieces} no tokenizer.json; save it with transformers: "
        "AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
    )


def apply_config(backend: tokenizers.Tokenizer, config: Mapping[str, JsonValue]) -> dict[str, str]:
    """Brings the added tokens in line with tokenizer_config.json; returns the named tokens."""
    entries = config.get("added_tokens_decoder") or {}
    if not isinstance(entries, dict) or len(entries) > 1 << 16:
        raise ConfigError(f"{SOURCE}: added_tokens_decoder: expected an object of tokens")
    for key, entry in entries.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(content, str) or not content:
            raise ConfigError(
                f"{SOURCE}: added_tokens_decoder: {key[:32]}: expected an object with content, "
                f"found {describe_value(entry)}"
            )
        token = tokenizers.AddedToken(content, normalized=entry.get("normalized") is True)
        if entry.get("special") is True:
            backend.add_special_tokens([token])
        elif backend.token_to_id(content) is None:
            backend.add_tokens([token])
        if str(backend.token_to_id(content)) != key:
            raise ConfigError(
                f"{SOURCE}: {content!r} has id {key[:32]}, but {backend.token_to_id(content)} "
                "by tokenizer.json; take both files from the same checkpoint"
            )
    named: dict[str, str] = {}
    for name in NAMED_TOKENS:
        content = _token_content(config.get(name), f"{SOURCE}: {name}")
        if content is not None:
            named[name] = content
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    items = list(extra.values()) if isinstance(extra, dict) else extra
    if not isinstance(items, list):
        raise ConfigError(f"{SOURCE}: additional_special_tokens: expected a list of tokens")
    contents = [_token_content(item, f"{SOURCE}: additional_special_tokens") for item in items]
    special = [content for content in (*named.values(), *contents) if content]
    for content in special:
        if backend.token_to_id(content) is None:
            raise ConfigError(
                f"{SOURCE}: names the special token {content[:64]!r}, which tokenizer.json lacks"
            )
    backend.add_special_tokens(
        [tokenizers.AddedToken(content, normalized=False) for content in special]
    )
    for token in backend.get_added_tokens_decoder().values():
        if token.special and (token.lstrip or token.rstrip or token.single_word):
            raise ConfigError(
                f"tokenizer.json: the special token {token.content!r} has lstrip, rstrip or "
                "single_word set; no tokenizer of a supported model has"
            )
    return named


def mark_control_tokens(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Makes the tokens of roles special where the checkpoint does not call them so.

    DeepSeek's tokens of turns are such: a user who spells one would begin a turn. Returns their
    ids; they are part of a decoded text all the same.
    """
    added = backend.get_added_tokens_decoder()
    found = {
        token_id: token.content
        for token_id, token in added.items()
        if not token.special and _CONTROL.fullmatch(token.content)
    }
    backend.add_special_tokens(
        [tokenizers.AddedToken(content, normalized=False) for content in found.values()]
    )
    return frozenset(found)


def _token_content(value: JsonValue, where: str) -> str | None:
    """A token that is written as its text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value or None
    raise ConfigError(f"{where}: expected a token, found {describe_value(value)}")


def read_templates(root: Path, config: Mapping[str, JsonValue], own: Path | None) -> dict[str, str]:
    """Templates by name: `own` wins over chat_template.jinja, and that over tokenizer_config.json.

    Raises:
        ConfigError: a file that cannot be read, or no template.
    """
    file = own or find_file(root, "chat_template.jinja")
    if file is not None:
        try:
            return {"default": file.read_text(encoding="utf-8")}
        except OSError as error:
            raise ConfigError(f"chat template {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"chat template {file}: it is not UTF-8") from None
    value = config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    templates: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [value]:
        name = entry.get("name") if isinstance(entry, dict) else None
        text = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(text, str):
            raise ConfigError(
                "tokenizer_config.json: chat_template: expected a text or a list of "
                f"{{name, template}}, found {describe_value(value)}"
            )
        templates[name] = text
    return templates
