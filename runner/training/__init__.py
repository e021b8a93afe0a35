"""Trains one run. Private: may change in any release."""
