"""Reports a sweep's results."""
