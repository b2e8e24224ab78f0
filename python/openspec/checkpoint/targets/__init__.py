"""What a target's `config.json` says, by family."""
