"""P-EAGLE heads: what speculators' own module says at every depth beside openspec's drafts.

Its forward pass is one of training, over rows that it samples: `lm_head` is listened to, and the
rows of one anchor are looked up in the sample. Trees grow from the same marginals by openspec's
rule, which the tests compare with a reference.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.oracles.case import Case, DiffersError, Sources
from bench.oracles.eagle3 import (
    CAPTURED,
    DEPTH,
    NUM_DRAFTS,
    NUM_NODES,
    SEED,
    Context,
    check_trees,
    compare,
    make_contexts,
    make_target,
)
from bench.oracles.engine import Path_
from bench.oracles.models import (
    DRAFT_VOCAB,
    VOCAB,
    geometry,
    randomise,
    save,
    speculators_config,
    token_map,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedConfig

TOP_K = 3
MASK = VOCAB - 1


class PEagleHead:
    """speculators' draft model."""

    def __init__(self, folder: Path, layer: PreTrainedConfig, **fields: object) -> None:
        from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig

        config = PEagleSpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=DRAFT_VOCAB,
            mask_token_id=MASK,
            eagle_aux_hidden_state_layer_ids=[i + 1 for i in CAPTURED],
            speculators_config=speculators_config("peagle", folder.parent / "target", NUM_DRAFTS),
            **fields,
        )
        self.model = PEagleDraftModel(config)
        randomise(self.model, SEED + 2)
        self.model.d2t, self.model.t2d = token_map(SEED)
        save(self.model, folder)

    def marginals(self, context: Context) -> Tensor:
        """Log-probabilities [NUM_DRAFTS, DRAFT_VOCAB] behind the last token of the context."""
        import torch
        from speculators.losses import resolve_loss_config
        from speculators.models.peagle.data import generate_cod_sample_indices

        heard: list[Tensor] = []

        def listen(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            heard.append(output[0])

        known = len(context.captured)
        length = known + NUM_DRAFTS  # the sample leaves places out at random; these are not read
        captured = torch.cat((context.captured, torch.zeros(NUM_DRAFTS, context.captured.shape[1])))
        tokens = torch.tensor([(context.tokens[1:] + [0] * NUM_DRAFTS)[:length]])
        mask = torch.ones(1, length)
        sample = {"num_depths": NUM_DRAFTS, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
        for seed in range(1000):
            torch.manual_seed(seed)
            anchor, depth = generate_cod_sample_indices(seq_length=length, loss_mask=mask, **sample)
            rows = [
                ((anchor == known - 1) & (depth == d)).nonzero().flatten().tolist()
                for d in range(NUM_DRAFTS)
            ]
            if all(rows):
                break
        else:
            raise DiffersError("no sample has all rows of the last token")
        handle = self.model.lm_head.register_forward_hook(listen)
        torch.manual_seed(seed)
        self.model(
            hidden_states=captured[None],
            input_ids=tokens,
            document_ids=torch.zeros(1, length, dtype=torch.long),
            loss_mask=mask,
            verifier_last_hidden_states=torch.zeros(
                1, length, self.model.config.transformer_layer_config.hidden_size
            ),
            loss_config=resolve_loss_config("kl_div", "eager"),
            **sample,
        )
        handle.remove()
        return heard[0][[row for (row,) in rows]].log_softmax(-1)

    def chain(self, context: Context) -> list[int]:
        """The most likely token of every depth."""
        columns = self.marginals(context).argmax(-1)
        return [int(column + self.model.d2t[column]) for column in columns]

    def tree(self, context: Context) -> set[Path_]:
        """The paths of the highest products of marginals, among the TOP_K best of each depth."""
        scores, columns = self.marginals(context)[:DEPTH].sort(descending=True, stable=True)
        paths: dict[tuple[int, ...], float] = {(): 0.0}
        level = dict(paths)
        for d in range(DEPTH):
            level = {
                (*path, int(columns[d, k] + self.model.d2t[columns[d, k]])): score
                + float(scores[d, k])
                for path, score in level.items()
                for k in range(TOP_K)
            }
            paths |= level
        del paths[()]
        return set(sorted(paths, key=lambda path: -paths[path])[:NUM_NODES])


def peagle(num_layers: int, **fields: object) -> Callable[[Path, Sources], str]:
    """Chains, and trees of the module's marginals."""

    def run(folder: Path, sources: Sources) -> str:
        target = make_target(folder / "target", "qwen3")
        head = PEagleHead(folder / "head", geometry("qwen3", num_layers), **fields)
        contexts = make_contexts(target, CAPTURED)
        said = compare(folder, "peagle", head, contexts)
        trees = check_trees(folder, "peagle", contexts, head.tree, TOP_K)
        return f"{said}; {trees} from marginals"

    return run


CASES = [
    Case(kind="head", format="P-EAGLE, one layer", oracle="speculators", run=peagle(1)),
    Case(
        kind="head",
        format="P-EAGLE, four layers",
        oracle="speculators",
        run=peagle(4, fc_norm=True, norm_before_residual=True),
    ),
]
