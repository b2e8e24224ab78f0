from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from openspec.text.detokenizer import IncrementalDetokenizer
from tests.unit.examples import examples
from tests.unit.toy_tokenizer import toy_tokenizer

# The first 256 ids are single bytes, so that broken characters of every kind occur.
IDS = st.lists(
    st.one_of(st.integers(0, 255), st.integers(0, toy_tokenizer().num_tokens + 5), st.just(2**31)),
    max_size=40,
)


@examples(500)
@given(IDS, st.booleans())
def test_pieces_are_the_whole(ids: list[int], skip: bool) -> None:
    tokenizer = toy_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    pieces = [detokenizer.append(token_id) for token_id in ids]
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) + detokenizer.finish() == whole


@examples(200)
@given(st.text(max_size=30))
def test_text_comes_as_soon_as_it_is_certain(text: str) -> None:
    tokenizer = toy_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    seen = ""
    ids = tokenizer.encode(text)
    for count, token_id in enumerate(ids, 1):
        seen += detokenizer.append(token_id)
        # Nothing but an unfinished character is missing.
        whole = tokenizer.decode(ids[:count])
        assert whole.removesuffix("\ufffd").startswith(seen)
        assert len(whole) - len(seen) <= 1
    assert detokenizer.finish() == ""


def test_an_emoji_over_four_tokens() -> None:
    tokenizer = toy_tokenizer()
    by_byte = {tokenizer.token_bytes(i): i for i in range(256)}
    ids = [by_byte[bytes([byte])] for byte in "🙂".encode()]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.append(token_id) for token_id in ids] == ["", "", "", "🙂"]
    assert detokenizer.append(ids[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens() -> None:
    tokenizer = toy_tokenizer()
    ids = tokenizer.encode("a<|im_end|><think>b", parse_special=True)
    for skip, expected in ((True, "a<think>b"), (False, "a<|im_end|><think>b")):
        detokenizer = IncrementalDetokenizer(tokenizer, skip)
        assert "".join(map(detokenizer.append, ids)) == expected


def test_cost_does_not_grow_with_the_text() -> None:
    tokenizer = toy_tokenizer()
    ids = tokenizer.encode("The quick brown fox 🙂 ") * 20_000
    detokenizer = IncrementalDetokenizer(tokenizer)
    times = []
    for part in (ids[:20_000], ids[-20_000:]):
        start = time.process_time()  # whatever else the machine does
        for token_id in part:
            detokenizer.append(token_id)
        times.append(time.process_time() - start)
    assert times[1] < 10 * times[0] + 0.1
