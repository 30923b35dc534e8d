"""Modules as FX graphs, and the rewrites that every use of them needs.

In: a float module and an example. Does: traces the module, replaces subclasses of torch's layers by torch's own layers,
folds batch norms. Out: an FX graph module, or a program of ATen operators.
"""
