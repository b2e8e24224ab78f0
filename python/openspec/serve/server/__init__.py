"""One server from start to end: the address, the engines, the table of paths."""
