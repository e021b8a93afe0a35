"""Settings and limits of this process. Private: it may change at any time."""
