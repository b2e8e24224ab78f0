"""Trees of JSON as rules of a grammar."""
