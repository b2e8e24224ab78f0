"""A language model that others trained."""
