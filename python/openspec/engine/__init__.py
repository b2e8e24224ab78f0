"""The engine: requests in, tokens out."""
