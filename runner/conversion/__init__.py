"""Data sets as files: converted to shards, or shown on a page.

Private: it may change at any time.
"""
