from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from openspec.errors import ConfigError, RequestError
from openspec.text.tokenizer import Tokenizer
from tests.unit.examples import examples
from tests.unit.toy_tokenizer import (
    MARKUP,
    SPECIAL,
    save_toy_tokenizer,
    tokenizer_config,
    tokenizer_json,
    toy_tokenizer,
)

TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, *MARKUP, "<|", "|>", "<", "\n", " "]), st.text(max_size=8)
    ),
    max_size=8,
).map("".join)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import transformers

    folder = save_toy_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return transformers.AutoTokenizer.from_pretrained(folder)


@examples(200)
@given(TEXTS)
def test_encode_is_the_reference(reference: Any, text: str) -> None:
    expected = reference.encode(text, add_special_tokens=False)
    assert toy_tokenizer().encode(text, parse_special=True) == expected


@examples(200)
@given(TEXTS)
def test_encode_never_yields_special_tokens_unasked(text: str) -> None:
    tokenizer = toy_tokenizer()
    ids = tokenizer.encode(text)
    assert not set(ids) & set(tokenizer.special_tokens.values())
    backend = tokenizers.Tokenizer.from_str(tokenizer_json())
    normalized = backend.normalizer.normalize_str(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == normalized


@examples(200)
@given(st.lists(st.integers(0, toy_tokenizer().num_tokens + 20), max_size=40), st.booleans())
def test_decode_is_the_reference(reference: Any, ids: list[int], skip: bool) -> None:
    backend = reference.backend_tokenizer
    expected = backend.decode(ids, skip_special_tokens=skip)
    assert toy_tokenizer().decode(ids, skip_special_tokens=skip) == expected


def test_token_bytes_and_text() -> None:
    tokenizer = toy_tokenizer()
    ids = tokenizer.encode("👩 é")
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == "👩 é".encode()
    first_byte = next(i for i in range(300) if tokenizer.token_bytes(i) == b"\xf0")
    assert tokenizer.token_text(first_byte) == "\ufffd"
    for unknown in (-1, tokenizer.num_tokens, 2**31, 2**70):
        assert tokenizer.token_bytes(unknown) == b""
    assert tokenizer.token_text(tokenizer.special_tokens["<|im_end|>"]) == "<|im_end|>"


def test_check_token_ids() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.check_token_ids(range(tokenizer.num_tokens))
    for bad in (-1, tokenizer.num_tokens, 2**63, 2**20000):
        with pytest.raises(RequestError, match="outside the tokenizer's range") as caught:
            tokenizer.check_token_ids([0, bad])
        assert len(str(caught.value)) < 200


def test_lone_surrogates_and_length() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        toy_tokenizer().encode("a\ud800b")
    with pytest.raises(RequestError, match="surrogate"):
        toy_tokenizer().encode("a\ud800<|im_end|>b", parse_special=True)
    with pytest.raises(RequestError, match="longer than"):
        toy_tokenizer().encode("a" * (2**24 + 1))


def test_post_processor_surrounds_once() -> None:
    backend = tokenizers.Tokenizer.from_str(tokenizer_json())
    end = backend.token_to_id("<|endoftext|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", end)]
    )
    tokenizer = Tokenizer(backend)
    plain = tokenizer.encode("fox<|im_end|>fox", parse_special=True)
    ids = tokenizer.encode("fox<|im_end|>fox", parse_special=True, add_special_tokens=True)
    assert ids == [end, *plain, end]
    assert tokenizer.encode("", add_special_tokens=True) == [end, end]


def test_from_folder(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save_toy_tokenizer(tmp_path))
    assert tokenizer.eos_token_id == tokenizer.special_tokens["<|im_end|>"]
    assert set(tokenizer.special_tokens) == set(SPECIAL)
    assert tokenizer.has_chat_template


def test_special_flags_of_tokenizer_config_win(tmp_path: Path) -> None:
    folder = save_toy_tokenizer(tmp_path)
    config: Any = tokenizer_config()
    think = next(k for k, v in config["added_tokens_decoder"].items() if v["content"] == "<think>")
    config["added_tokens_decoder"][think]["special"] = True
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.special_tokens["<think>"] == int(think)
    assert int(think) not in tokenizer.encode("<think>")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}, "same checkpoint"),
        ({"added_tokens_decoder": {"9999": {"content": "<new>", "special": True}}}, "has id 9999"),
        ({"added_tokens_decoder": {"x": 3}}, "expected an object with content"),
        ({"added_tokens_decoder": []}, None),
        ({"added_tokens_decoder": [1]}, "expected an object"),
        ({"eos_token": "<nope>"}, "which tokenizer.json lacks"),
        ({"eos_token": 3}, "eos_token: expected a token"),
        ({"chat_template": 3}, "chat_template: expected a text"),
        ({"chat_template": [{"name": "default"}]}, "chat_template: expected a text"),
        ({"chat_template": "{% if %}"}, "does not compile"),
        ({"additional_special_tokens": 3}, "expected a list"),
    ],
)
def test_bad_tokenizer_config(tmp_path: Path, change: dict[str, Any], message: str | None) -> None:
    folder = save_toy_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer_config(), **change}))
    if message is None:
        Tokenizer.from_folder(folder)
        return
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_folder(folder)


def test_bad_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    data = json.loads(tokenizer_json())
    for change, message in (
        ({"decoder": {"type": "Fuse"}}, "ByteLevel decoder"),
        ({"model": {**data["model"], "dropout": 0.5}}, "dropout"),
        (
            {"added_tokens": [{**token, "lstrip": True} for token in data["added_tokens"]]},
            "lstrip",
        ),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps({**data, **change}))
        with pytest.raises(ConfigError, match=message):
            Tokenizer.from_folder(tmp_path)


def test_template_file_wins_and_named_templates(tmp_path: Path) -> None:
    folder = save_toy_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_text("from file")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]).text == "from file"
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    config = {**tokenizer_config(), "chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_folder(folder)
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(messages).text == "A"
    assert tokenizer.render_chat(messages, [{"type": "function"}]).text == "B"


def test_no_template(tmp_path: Path) -> None:
    folder = save_toy_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_bad_words_inside_words_and_at_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = {"no": [1, 2], " no": [3, 2], "go": [4], " go": [5, 4], "x": [6], " x": [6]}
    tokenizer = toy_tokenizer()
    monkeypatch.setattr(tokenizer, "encode", lambda text: ids[text])
    # With a space another first token, more tokens, and the same ones.
    assert tokenizer.ids_of_bad_words(["  no", "go", "x"]) == [[1, 2], [3, 2], [4], [6]]
