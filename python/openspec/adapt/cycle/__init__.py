"""One turn of adapting a head: measure, learn, decide, swap."""
