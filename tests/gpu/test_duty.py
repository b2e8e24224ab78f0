"""Work beside a server on a GPU: what a piece began there is done when it ends."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch

from openspec import _C, LLM, SamplingParams
from openspec.adapt.cycle.duty import Duty
from openspec.config import EMBEDDED_MODEL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _C.has_cuda(), reason=f"no CUDA: {_C.why_no_cuda()}"),
]


def test_a_piece_ends_when_the_gpu_is_done() -> None:
    """On every stream; and the work's share counts that time."""
    done, stream = torch.cuda.Event(), torch.cuda.Stream()
    beside = Duty(0.5, lambda: 1, is_cuda=True)
    with beside.piece():
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # 0.1 s
            done.record()
        assert not done.query()
        begin = time.monotonic()
    worked = time.monotonic() - begin
    assert done.query() and worked > 0.05
    with beside.piece():
        assert time.monotonic() - begin > 1.9 * worked


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_steps_in_pieces_change_no_text(share: float) -> None:
    """Steps are launched ahead on a GPU: one that is in flight ends with its piece."""
    prompts = [[5, 6, 7, 8, 9] * n for n in (1, 3, 8)]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=48, ignore_eos=True)
    small: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    with LLM(model=str(EMBEDDED_MODEL), device="cuda", **small) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
        llm.around_step = Duty(share, lambda: 0 if share == 0 else 1, True, math.inf).piece
        found = llm.generate(prompts, params, use_tqdm=False)
        llm.engine.check_integrity()
    texts = [[one.outputs[0].token_ids for one in some] for some in (expected, found)]
    assert texts[0] == texts[1]
