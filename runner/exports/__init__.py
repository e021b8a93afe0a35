"""Export a run's model to formats of other runtimes, and compare each with the model.

Private: it may change at any time.
"""
