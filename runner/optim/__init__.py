"""Optimizers, schedules and initial weights; configs name the classes."""
