"""Runs a sweep. Private: it may change at any time."""
