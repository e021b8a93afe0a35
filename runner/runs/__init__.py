"""List, select and delete runs. Private: it may change at any time."""
