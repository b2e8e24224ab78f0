"""What clients send and get: bodies of requests and the JSON of answers."""
