"""The embedded model's files through our readers and through the reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

import openspec
from openspec.checkpoint.targets.config import ModelConfig
from openspec.checkpoint.weights import checkpoint_files
from openspec.text.tokenizer import Tokenizer
from tests.unit.examples import examples
from tests.unit.test_chat_template import HOSTILE, PLAIN, chats
from tests.unit.test_tokenizer import TEXTS

FOLDER = Path(openspec.__file__).parent / "models" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(FOLDER)


@pytest.fixture(scope="module")
def reference() -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(FOLDER)


def test_config_and_tensors_agree(tokenizer: Tokenizer) -> None:
    config = ModelConfig.from_folder(FOLDER)
    assert (config.hidden_size, config.num_layers, config.spec.tie_word_embeddings) == (
        320,
        4,
        True,
    )
    attention = config.spec.layers[0].mixer
    assert (attention.num_q_heads, attention.num_kv_heads, attention.head_dim) == (4, 1, 128)
    assert config.vocab_size == 4096 > tokenizer.num_tokens
    assert tokenizer.eos_token_id in config.eos_token_ids
    (file,) = checkpoint_files(FOLDER)
    assert len(file.tensors) == 2 + 11 * config.num_layers
    assert {info.dtype for info in file.tensors.values()} == {"BF16"}
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 20 << 20


@examples(200)
@given(TEXTS)
def test_encoding_is_the_reference(reference: Any, tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, parse_special=True)
    assert ids == reference.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@examples(200)
@given(chats(PLAIN))
def test_chats_are_the_reference(reference: Any, tokenizer: Tokenizer, messages: Any) -> None:
    chat = tokenizer.render_chat(messages)
    expected = reference.apply_chat_template(messages, add_generation_prompt=True)
    assert chat.token_ids == expected["input_ids"]


@pytest.mark.slow
@examples(200)
@given(chats(HOSTILE))
def test_only_the_template_makes_turns(reference: Any, tokenizer: Tokenizer, messages: Any) -> None:
    chat = tokenizer.render_chat(messages)
    text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.text == text
    start = tokenizer.special_tokens["<|im_start|>"]
    # Tool answers in a row share one turn.
    turns = sum(
        message["role"] != "tool" or index == 0 or messages[index - 1]["role"] != "tool"
        for index, message in enumerate(messages)
    )
    assert chat.token_ids.count(start) == turns + 1
