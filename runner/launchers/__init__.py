"""Launchers that configs name: where the runs of a sweep start."""
