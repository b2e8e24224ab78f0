"""Regular expressions as automata."""
