"""The OpenAI-compatible server: `python -m openspec.serve`."""
