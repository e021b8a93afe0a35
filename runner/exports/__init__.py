"""A run's model in formats that other runtimes take, each compared with the model itself."""
