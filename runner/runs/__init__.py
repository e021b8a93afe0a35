"""Lists, selects and deletes runs."""
