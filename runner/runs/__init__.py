"""Lists, selects and deletes runs. Private: it may change at any time."""
