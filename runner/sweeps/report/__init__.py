"""Report a sweep's results."""
