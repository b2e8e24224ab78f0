"""Quantised weights: what a folder says of them, what its tensors are, and how to make them."""
