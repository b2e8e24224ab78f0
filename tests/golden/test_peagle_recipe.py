"""The training recipe of P-EAGLE heads computes what the reference and the engine do."""

from __future__ import annotations

from pathlib import Path

import torch
from bench.tiny_model.eagle3.generate import load_target
from bench.tiny_model.eagle3.train import teach
from bench.tiny_model.peagle.export import write
from bench.tiny_model.peagle.head import PEagleHead
from bench.tiny_model.peagle.train import STEPS, begin, go_on

from tests.golden.engine_runs import make_runner, prefill, step
from tests.golden.make_eagle3 import TINY, load
from tests.golden.peagle_reference import PEagleReference
from tests.golden.stored_cases import close

VOCABULARY = torch.arange(3, 4000, 31)


def random_head() -> PEagleHead:
    """Such that every part matters, in numbers of bf16."""
    torch.manual_seed(0)
    head = PEagleHead(len(VOCABULARY))
    with torch.no_grad():
        head.mask_hidden.mul_(0.25)
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            parameter.copy_(parameter.bfloat16().float())
    return head.requires_grad_(False)


def test_a_chain_of_training_is_one_of_drafting(tmp_path: Path) -> None:
    """In rows of two documents, at one position of each; and the exported head drafts it."""
    target = load_target(TINY, torch.device("cpu"), torch.float32)
    head = random_head()
    folder = write(tmp_path / "head", head, VOCABULARY)
    reference = PEagleReference(*load(folder), embedding=target.model.embed_tokens.weight)
    to_draft = torch.full((4096,), -1)
    to_draft[VOCABULARY] = torch.arange(len(VOCABULARY))
    tokens = torch.randint(0, 4000, (1, 30))
    places = torch.cat((torch.arange(18), torch.arange(12)))[None]
    with torch.no_grad():
        fields = teach(target, VOCABULARY, to_draft, tokens, places)
        embedding = head.embed_tokens.weight
        _, state, entries = begin(head, embedding, fields, places)
        states = [state]
        for number in range(1, STEPS):
            _, state, entries = go_on(
                head, embedding, fields, places, state, entries, torch.tensor(number)
            )
            states.append(state)
        for start, end in ((0, 18), (18, 30)):
            ids = tokens[0, start:end].tolist()
            _, captured = target.model(tokens[:, start:end], (0, 1, 2))
            rows, cache = reference.extend(
                reference.empty(), ids[1:], torch.cat(captured, -1)[0, :-1]
            )
            close(states[0][0, start + 1 : end], rows)
            masked = reference.masked(cache.up_to(4), rows[3], STEPS)
            close(torch.stack([state[0, start + 4] for state in states]), masked)

        runner = make_runner((TINY, folder), "peagle", STEPS)
        prompt = tokens[0, :18].tolist()
        slot, known = prefill(runner, prompt)
        step(runner, slot, 1, STEPS)
        _, captured = target.model(tokens[:, :18], (0, 1, 2))
        rows, cache = reference.extend(
            reference.empty(), prompt[1:] + known, torch.cat(captured, -1)[0]
        )
        assert runner.last_drafts() == [reference.chain(cache, rows[-1], STEPS).tokens]
