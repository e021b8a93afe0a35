"""Tells from which photograph a tile was cut."""
