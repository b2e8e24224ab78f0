"""Draft heads for a model of your own."""
