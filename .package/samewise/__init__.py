"""samewise: the same experiment gives the same bits."""

__version__ = "0.1.0"
