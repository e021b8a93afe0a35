"""Repeats and compares runs. Private: it may change at any time."""
