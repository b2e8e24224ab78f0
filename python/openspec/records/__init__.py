"""Texts that a server wrote, as token ids."""
