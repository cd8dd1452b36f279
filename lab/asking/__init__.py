"""Chat prompts made of training text: what a target answers and its draft heads learn from. See `lab/prompts.py`."""
