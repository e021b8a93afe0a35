"""Reads and writes what is on disk. Private: it may change at any time."""
