"""vLLM 0.24's view of EAGLE-3 and DFlash heads: python bench/peer/to_vllm.py CHECKPOINT OUT.

No tensor changes, so OUT links to the weights. What differs is where config.json names the captured
states and how it counts them. vLLM reads `eagle_aux_hidden_state_layer_ids` at the top level as
"entering layer i"; our ids count outputs, one less. For DFlash vLLM adds 1 to `target_layer_ids`
itself, but only the list at the top level enters the key of its cache of compiled graphs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

NUM_ROWS = 16  # of a block: vLLM is started with 15 drafts


def entering_layers(name: str, config: dict) -> list[int]:
    """The captured states as vLLM counts them; adapts what the V1 runner reads of EAGLE-3."""
    if name == "eagle3":
        inner = config["eagle_config"]
        entering = [layer + 1 for layer in inner["eagle_aux_hidden_state_layer_ids"]]
        inner["eagle_aux_hidden_state_layer_ids"] = entering
        config["norm_before_residual"] = False
    else:
        if config["block_size"] != NUM_ROWS:
            sys.exit(f"{name}: blocks of {config['block_size']} rows; {NUM_ROWS} are expected")
        entering = [layer + 1 for layer in config["dflash_config"]["target_layer_ids"]]
    if entering != sorted(entering):
        sys.exit(f"{name}: vLLM joins the states in the order of layers, not as {entering}")
    return entering


def main() -> None:
    """Command line."""
    model, out = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    for name in ("eagle3", "dflash"):
        source, target = model / name, out / name
        config = json.loads((source / "config.json").read_text())
        config["eagle_aux_hidden_state_layer_ids"] = entering_layers(name, config)
        target.mkdir(parents=True, exist_ok=True)
        (target / "config.json").write_text(json.dumps(config, indent=2))
        for path in source.glob("*.safetensors*"):
            link = target / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path)
        print(f"{target}: states entering layers {config['eagle_aux_hidden_state_layer_ids']}")


if __name__ == "__main__":
    main()
