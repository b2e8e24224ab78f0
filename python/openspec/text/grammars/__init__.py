"""Grammars of answers: what a request demands, and the process that compiles it."""
