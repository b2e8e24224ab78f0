"""The loop of one engine: who runs, what a step carries, what comes of it."""
