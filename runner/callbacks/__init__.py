"""Callbacks that configs name."""
