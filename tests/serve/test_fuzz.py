"""Ten thousand broken bodies against the fake engine, which costs no time; see test_hostile.py."""

from __future__ import annotations

import time

import pytest

from tests.serve.conftest import RunningServer
from tests.serve.mutants import check_answers


@pytest.mark.slow
@pytest.mark.parametrize("num_bodies", [3000, pytest.param(10_000, marks=pytest.mark.full)])
def test_no_body_breaks_the_server(server: RunningServer, num_bodies: int) -> None:
    # Short answers, also where the mutation took away the limit.
    server.engine.script = lambda _: server.ids("one two<|im_end|>")
    check_answers(server.port, num_bodies)
    assert server.complete(prompt="a", max_tokens=2)
    assert server.context.num_sequences == 0


def test_large_broken_bodies_are_refused_quickly(server: RunningServer) -> None:
    rows = 1_500_000
    headers = {"content-type": "application/json"}
    for body in (
        b'{"prompt": [' + b'"a",' * rows + b'"a"]}',
        b'{"prompt": [' + b"[1]," * rows + b"[1]]}",
        b'{"prompt": "a", "stop": [' + b"1," * rows + b"1]}",
        b'{"prompt": "a", "logit_bias": {"1": "' + b"x" * 6_000_000 + b'"}}',
        b'{"prompt": "a", "logit_bias": {'
        + b",".join(b'"%d": "x"' % number for number in range(300_000))
        + b"}}",
        b"[" * 8_000_000,
        b'{"a":' * 1_500_000,
    ):
        # Of the processor: the machine may be busy with other things.
        started = time.process_time()
        response = server.client.post("/v1/completions", content=body, headers=headers)
        assert response.status_code == 400, response.text
        assert len(response.content) < 4000
        assert time.process_time() - started < 10
