"""The benchmark: plain decoding against a method, through the server's own HTTP path."""
