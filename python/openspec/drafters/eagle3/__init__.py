"""Heads that draft from the target's hidden states, token by token or all at once."""
