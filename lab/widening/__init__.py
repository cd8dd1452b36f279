"""Checkpoints of a larger shape that compute the same function, and draft heads for them: see `lab/widen.py`."""
