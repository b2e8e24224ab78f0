"""Copies from recent answers: our memory's beside those of the suffix trees that vLLM uses.

Both are given the same answers and asked to go on from the same ends of texts. Counting the
answers, without either's code, says which continuation is the most frequent.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.oracles.case import Case, DiffersError, Sources

NUM_ANSWERS, ANSWER_LEN, NUM_CONTEXTS, CONTEXT_LEN, NUM_DRAFTS = 60, 120, 400, 40, 8
LOOKED_UP = (4, 8, 16)
"""Ends of a text that our memory looks up, in tokens; the longest that it finds is copied."""
NUM_PHRASES, NUM_TOKENS = 40, 3000


def make_answers(draw: random.Random) -> list[list[int]]:
    """Phrases in an order that varies, and here and there another token: most continuations are
    known, several have more than one."""
    phrases = [
        [draw.randrange(300, NUM_TOKENS) for _ in range(draw.randrange(5, 14))]
        for _ in range(NUM_PHRASES)
    ]
    answers = []
    for _ in range(NUM_ANSWERS):
        answer: list[int] = []
        while len(answer) < ANSWER_LEN:
            answer += phrases[int(draw.triangular(0, NUM_PHRASES, 0))]
            if draw.random() < 0.2:
                answer[-1 - draw.randrange(4)] = draw.randrange(300, NUM_TOKENS)
        answers.append(answer[:ANSWER_LEN])
    return answers


def make_contexts(answers: Sequence[list[int]], draw: random.Random) -> list[list[int]]:
    """Ends of texts: of an answer the tokens before some place, behind others that are unknown."""
    contexts = []
    for _ in range(NUM_CONTEXTS):
        num_known = draw.randrange(2, 2 * LOOKED_UP[-1])
        answer = draw.choice(answers)
        end = draw.randrange(num_known, ANSWER_LEN - 1)
        unknown = [draw.randrange(3000, 4000) for _ in range(CONTEXT_LEN - num_known)]
        contexts.append(unknown + answer[end - num_known : end])
    return contexts


def copies_here(answers: Sequence[list[int]], contexts: Sequence[list[int]]) -> list[list[int]]:
    """Drafts of an engine that remembers the answers, and whose lookup finds nothing."""
    from openspec import _C
    from openspec.config import config_from_settings
    from openspec.engine.load import load_engine
    from openspec.messages import SamplingParams

    settings = {
        "method": "ngram",
        "method_options": {"ngram_min": CONTEXT_LEN, "ngram_max": CONTEXT_LEN},
        "draft_memory": 1 << 22,
        "adaptive_speculation": False,
        "enable_prefix_caching": False,
        "device": "cpu",
        "num_threads": 1,
        "max_num_seqs": 1,
        "stats_interval_s": 0.0,
    }
    runner = load_engine(config_from_settings(settings))._runner  # type: ignore[attr-defined]
    params = _C.SequenceParams(SamplingParams(temperature=0.0), max_tokens=64)
    for answer in answers:
        runner.remove_sequence(runner.add_sequence([0, *answer], 1, params))
    found = []
    for context in contexts:
        slot = runner.add_sequence(context, len(context), params)
        lease = runner.reserve([(slot, len(context), NUM_DRAFTS)])
        lease.launch()
        lease.collect()
        found += runner.last_drafts()
        lease.close()
        runner.remove_sequence(slot)
    return found


def copies_there(answers: Sequence[list[int]], contexts: Sequence[list[int]]) -> list[list[int]]:
    """Chains of the suffix trees, as long as ours after matches as long as ours."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache = SuffixDecodingCache(
        max_tree_depth=LOOKED_UP[-1] + NUM_DRAFTS + 1, max_cached_requests=1000
    )
    for number, answer in enumerate(answers):
        cache.start_request(number, [])
        cache.add_active_response(number, answer)
        cache.stop_request(number)
    cache.start_request("context", [])
    found = []
    for context in contexts:
        draft = cache.speculate(
            "context", context, max_spec_tokens=NUM_DRAFTS, max_spec_factor=2.0, min_token_prob=0.0
        )
        found.append(list(draft.token_ids) if draft.match_len >= LOOKED_UP[0] else [])
    return found


def match_len(answers: Sequence[list[int]], context: Sequence[int]) -> int:
    """Of the longest end of the context that goes on in an answer, up to those looked up."""
    for length in range(LOOKED_UP[-1], 0, -1):
        if following(answers, context[-length:]):
            return length
    return 0


def following(answers: Sequence[list[int]], end: Sequence[int]) -> Counter[int]:
    """What followed these tokens, and how often."""
    size = len(end)
    return Counter(
        answer[at + size]
        for answer in answers
        for at in range(len(answer) - size)
        if answer[at : at + size] == end
    )


def run(_folder: Path, _sources: Sources) -> str:
    """Whether what ours offers is what the trees offer, and where not, who is right."""
    draw = random.Random(0)
    answers = make_answers(draw)
    contexts = make_contexts(answers, draw)
    ours, theirs = copies_here(answers, contexts), copies_there(answers, contexts)
    num_both = num_first = num_whole = num_ours_frequent = num_theirs_frequent = 0
    for context, here, there in zip(contexts, ours, theirs, strict=True):
        length = match_len(answers, context)
        if bool(here) != (length >= LOOKED_UP[0]):
            raise DiffersError(f"after a match of {length} tokens there are {len(here)} copies")
        found = max((some for some in LOOKED_UP if some <= length), default=0)
        if here and here[0] not in following(answers, context[-found:]):
            raise DiffersError(f"token {here[0]} never followed these {found} tokens")
        if not (here and there):
            continue
        num_both += 1
        num_first += here[0] == there[0]
        num_whole += here[: len(there)] == there[: len(here)]
        counts = following(answers, context[-length:])
        num_ours_frequent += counts[here[0]] == max(counts.values())
        num_theirs_frequent += counts[there[0]] == max(counts.values())
    return (
        f"{num_both} of {NUM_CONTEXTS} ends are known to both; the first token is the same after "
        f"{num_first}, the whole draft after {num_whole}; the most frequent after the longest "
        f"match: {num_ours_frequent} here, {num_theirs_frequent} there"
    )


CASES = [
    Case(kind="memory", format="answers as suffix trees", oracle="arctic-inference", run=run),
]
