"""Watches the user's code in a training."""
