"""Config: overrides to a checked config, its errors and its fingerprint. Private: it may change."""
