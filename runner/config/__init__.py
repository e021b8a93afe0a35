"""Makes a config from overrides, with its errors and its fingerprint. Private: it may change at any time."""
