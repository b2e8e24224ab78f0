"""An engine in a process of its own: the front's client, the child, what they tell each other."""
