"""Heads that draft a block of tokens in one pass."""
