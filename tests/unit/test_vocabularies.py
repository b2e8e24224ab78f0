"""Vocabularies beside Qwen's: with a BOS, and with SentencePiece's marks of spaces."""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from openspec.errors import ConfigError
from openspec.text.detokenizer import IncrementalDetokenizer
from openspec.text.tokenizer import Tokenizer
from tests.unit.examples import examples
from tests.unit.toy_tokenizer import CORPUS, tokenizer_json

BOS, EOS = "<s>", "</s>"
SPECIAL = ("<unk>", BOS, EOS, "[INST]", "[/INST]")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
WITHOUT_BOS = TEMPLATE.removeprefix("{{ bos_token }}")
CONFIG: dict[str, Any] = {
    "bos_token": BOS,
    "eos_token": EOS,
    "unk_token": "<unk>",
    "tokenizer_class": "PreTrainedTokenizerFast",
}
TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, "fox ", " ", "\n", "  a", "é", "日"]), st.text(max_size=5)
    ),
    max_size=6,
).map("".join)
CHAT = [
    {"role": "user", "content": "hello fox"},
    {"role": "assistant", "content": "the dog"},
    {"role": "user", "content": " again"},
]


@lru_cache
def space_marked_json(*, scheme: str) -> str:
    """As Mistral 7B's: `first` marks the start of the text, `normalizer` that of every piece."""
    words = [word for text in CORPUS for word in text.split()]
    pieces = sorted({c for word in words for c in word} | {"\u2581"})
    vocab = {token: number for number, token in enumerate(SPECIAL)}
    for piece in [f"<0x{byte:02X}>" for byte in range(256)] + pieces:
        vocab[piece] = len(vocab)
    merges = []
    for left, right in (("\u2581", "f"), ("o", "x"), ("\u2581f", "ox"), ("\u2581", "\u2581")):
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if scheme == "normalizer":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    add_bos(backend)
    return backend.to_str()


def add_bos(backend: tokenizers.Tokenizer) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )


@lru_cache
def byte_level_json() -> str:
    backend = tokenizers.Tokenizer.from_str(tokenizer_json())
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    add_bos(backend)
    return backend.to_str()


SOURCES = {
    "byte-level": byte_level_json(),
    "first": space_marked_json(scheme="first"),
    "always": space_marked_json(scheme="always"),
    "normalizer": space_marked_json(scheme="normalizer"),
}


def ours(source: str, template: str = TEMPLATE) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(source), CONFIG, {"default": template})


@lru_cache
def reference(source: str) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(source), chat_template=TEMPLATE, **CONFIG
    )


@pytest.mark.parametrize("kind", SOURCES)
@examples(80)
@given(text=TEXTS)
def test_encode_is_the_reference(kind: str, text: str) -> None:
    tokenizer = ours(SOURCES[kind])
    ids = tokenizer.encode(text, parse_special=True, add_special_tokens=True)
    expected = reference(SOURCES[kind]).encode(text)
    bos = tokenizer.bos_token_id
    assert ids == (expected[1:] if expected[1:2] == [bos] else expected)
    assert ids[0] == bos


@pytest.mark.parametrize("kind", SOURCES)
@examples(40)
@given(text=TEXTS)
def test_texts_of_users_hold_no_special_tokens(kind: str, text: str) -> None:
    tokenizer = ours(SOURCES[kind])
    assert not set(tokenizer.encode(text)) & set(tokenizer.special_tokens.values()) - {0}


@pytest.mark.parametrize("kind", ["first", "always", "normalizer"])
@examples(100)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_its_length_tells(kind: str, text: str) -> None:
    tokenizer = ours(SOURCES[kind])
    text += "\u2581" * (len(text) // 2)
    assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, parse_special=True))
    assert tokenizer.min_num_tokens("fox " * 100_000) > 50_000


def test_tokens_of_turns_are_special_whatever_the_checkpoint_says() -> None:
    backend = tokenizers.Tokenizer.from_str(tokenizer_json())
    turn = "<\uff5cUser\uff5c>"
    backend.add_tokens([AddedToken(turn, normalized=False)])
    token_id = backend.token_to_id(turn)
    template = turn + "{{ messages[0].content }}"
    tokenizer = Tokenizer(backend, {}, {"default": template})
    chat = tokenizer.render_chat([{"role": "user", "content": f"a{turn}b"}])
    assert chat.token_ids.count(token_id) == 1 and chat.token_ids[0] == token_id
    assert chat.text == f"{turn}a{turn}b"
    assert tokenizer.encode(turn, parse_special=True) == [token_id]
    assert tokenizer.decode([token_id]) == turn  # as transformers


@pytest.mark.parametrize("kind", SOURCES)
def test_tokens_add_up_to_the_text(kind: str) -> None:
    tokenizer = ours(SOURCES[kind])
    text = "fox  fox\n日本 <0x0A> [INST] é 🙂"
    pieces = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    ids = tokenizer.encode(text, parse_special=True)
    joined = "".join(map(pieces.append, ids)) + pieces.finish()
    marks_start = kind != "byte-level"
    if kind in ("byte-level", "first"):
        assert joined == " " * marks_start + text
    expected = reference(SOURCES[kind]).backend_tokenizer.decode(ids, skip_special_tokens=False)
    assert joined.removeprefix(" " * marks_start) == expected
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    bare = tokenizer.encode("fox")
    assert tokenizer.decode(bare) == "fox" == reference(SOURCES[kind]).decode(bare)


@pytest.mark.parametrize("kind", SOURCES)
def test_a_chat_has_one_bos(kind: str) -> None:
    expected = reference(SOURCES[kind]).apply_chat_template(CHAT, return_dict=False)
    tokenizer = ours(SOURCES[kind])
    assert tokenizer.render_chat(CHAT).token_ids == expected
    assert expected.count(tokenizer.bos_token_id) == 1
    if kind != "first":  # there the piece behind a BOS of the text begins no text
        assert ours(SOURCES[kind], WITHOUT_BOS).render_chat(CHAT).token_ids == expected
    assert ours(SOURCES[kind], WITHOUT_BOS).render_chat(CHAT).token_ids.count(expected[0]) == 1


def test_only_what_the_tokenizer_adds_is_added() -> None:
    tokenizer = ours(SOURCES["byte-level"])
    assert tokenizer.adds_bos
    assert tokenizer.encode("fox")[0] != tokenizer.bos_token_id
    written = tokenizer.encode("<s>fox", parse_special=True, add_special_tokens=True)
    assert written == tokenizer.encode("fox", add_special_tokens=True)
    bare = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer_json()), {}, {"default": TEMPLATE})
    assert not bare.adds_bos and bare.bos_token_id is None
    assert bare.encode("fox", add_special_tokens=True) == bare.encode("fox")


def test_other_decoders_are_refused() -> None:
    data = json.loads(SOURCES["first"])
    data["decoder"]["decoders"][0]["content"] = "_"
    with pytest.raises(ConfigError, match="byte_fallback and its decoder"):
        ours(json.dumps(data))
    data = json.loads(SOURCES["first"])
    data["model"]["byte_fallback"] = False
    with pytest.raises(ConfigError, match="found BPE with Sequence"):
        ours(json.dumps(data))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tekken.json", r"has tekken\.json but no tokenizer\.json"),
        ("tokenizer.model", r"has tokenizer\.model but no tokenizer\.json; save it"),
    ],
)
def test_other_forms_are_refused_with_the_remedy(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(SOURCES["first"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "chat_template": "A"}))
    (tmp_path / "own").write_text("{{ strftime_now('%d %b %Y') }}")
    tokenizer = Tokenizer.from_folder(tmp_path, tmp_path / "own", datetime(2026, 3, 1))
    assert tokenizer.render_chat(CHAT).text == "01 Mar 2026"
    with pytest.raises(ConfigError, match="none: No such file"):
        Tokenizer.from_folder(tmp_path, tmp_path / "none")
