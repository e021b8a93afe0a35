"""Strategies that configs name: how a run is spread over processes."""
