"""Writes a run into one file, and reads runs from elsewhere. Private: it may change at any time."""
