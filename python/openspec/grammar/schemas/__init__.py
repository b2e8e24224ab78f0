"""JSON schemas as trees of what a grammar allows."""
