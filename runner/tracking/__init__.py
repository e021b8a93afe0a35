"""Sends what a run logs to MLflow and other stores. Private: it may change at any time."""
