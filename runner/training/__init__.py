"""Trains one run. Private: it may change at any time."""
