"""Sets torch up so that a training repeats to the bit."""
