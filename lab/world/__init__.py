"""A small consistent world, made by grammars: the text that `mini` learns from and is examined with.

`make.py` writes it. Every sample comes from a seed; what examines the model uses wordings and items that training never
sees.
"""
