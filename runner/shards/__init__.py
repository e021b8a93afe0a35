"""Files with many samples: their index, their formats, and the one door to their bytes.

Private: it may change at any time.
"""
