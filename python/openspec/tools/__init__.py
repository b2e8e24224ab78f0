"""Commands beside the server and the benchmark."""
