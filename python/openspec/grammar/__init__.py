"""Grammars of answers: what a request may ask for, rewritten, checked and compiled."""
