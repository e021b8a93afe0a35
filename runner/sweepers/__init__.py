"""Sweepers that configs name: which settings a sweep tries."""
