"""Modules as FX graphs, and what is rewritten there whatever is made of them.

In: a float module and an example. Does: traces it, finds torch's own layers in other libraries' ones, folds norms.
Out: an FX graph module, or a program of ATen operators.
"""
