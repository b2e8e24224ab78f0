"""Answers taken apart as they come: thinking, text and tool calls."""
