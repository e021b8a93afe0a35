"""Repeats and compares runs."""
