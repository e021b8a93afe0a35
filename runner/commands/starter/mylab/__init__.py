"""Experiments of mylab."""
