"""Composes a config from overrides and checks it.

Private: it may change at any time.
"""
