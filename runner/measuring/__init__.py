"""Measures a few steps of a training. Private: it may change at any time."""
