"""Handlers: a request of each path comes in, its answer goes out."""
