"""Text in and out: tokens, templates, stop strings, outputs."""
