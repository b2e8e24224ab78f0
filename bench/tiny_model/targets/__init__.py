"""Recipes of the tiny models that the tests have beside the embedded one."""
