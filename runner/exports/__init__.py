"""A run's model in formats that other runtimes take, each held against the model itself."""
