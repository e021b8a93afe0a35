"""Compares settings by pairs of runs. Private: it may change at any time."""
