"""What all forms of generation share, from a checked body to the pieces of an answer."""
