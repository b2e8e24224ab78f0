"""bench/peer: streams are taken apart as they came; layers are counted as vLLM counts them."""

from __future__ import annotations

import json

import pytest
from bench.peer.drive import events, read_answer
from bench.peer.to_vllm import entering_layers

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(text: str) -> bytes:
    return f"{len(text.encode()):x}\r\n{text}\r\n".encode()


def event(**fields: object) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def test_events_carry_the_time_of_their_last_byte() -> None:
    whole = HEAD + chunk(event(a=1)[:9]) + chunk(event(a=1)[9:] + ": silence\n\n" + event(a=2))
    whole += chunk("data: [DONE]\n\n") + b"0\r\n\r\n"
    cut = whole.index(b'": 1') + 2
    found = list(events([whole[:10], whole[10:cut], whole[cut:]], [1.0, 2.0, 3.0]))
    assert found == [(3.0, {"a": 1}), (3.0, {"a": 2})]


def test_answer() -> None:
    pieces = [
        HEAD + chunk(event(choices=[{"text": "one"}])),
        chunk(event(choices=[{"text": " two"}])),
        chunk(event(choices=[{"text": "", "finish_reason": "stop"}])),
        chunk(event(choices=[], usage={"completion_tokens": 3}) + "data: [DONE]\n\n"),
    ]
    answer = read_answer(7, 0.5, pieces, [1.0, 2.0, 3.0, 4.0])
    assert (answer.index, answer.at, answer.end, answer.num_tokens) == (7, [1.0, 2.0], 3.0, 3)
    other = read_answer(7, 0.5, [pieces[0], *pieces[2:]], [1.0, 3.0, 4.0])
    assert other.digest != answer.digest


def test_an_error_is_no_answer() -> None:
    with pytest.raises(RuntimeError, match="500"):
        list(events([b"HTTP/1.1 500 no\r\n\r\n"], [1.0]))
    with pytest.raises(RuntimeError, match="broken"):
        read_answer(0, 0.0, [HEAD + chunk(event(error="broken"))], [1.0])


def test_layers_as_vllm_counts_them() -> None:
    eagle3 = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}
    assert entering_layers("eagle3", eagle3) == [2, 18, 33]
    assert eagle3["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 18, 33]
    dflash = {"block_size": 16, "dflash_config": {"target_layer_ids": [1, 9, 17]}}
    assert entering_layers("dflash", dflash) == [2, 10, 18]
    with pytest.raises(SystemExit, match="7 rows"):
        entering_layers("dflash", {**dflash, "block_size": 7})
