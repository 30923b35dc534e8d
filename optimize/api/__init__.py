"""The Python API for experiments.

In: what a program holds: modules, data, settings. Does: loads, applies passes, compares, searches, profiles, packs.
Out: variants, and what was measured of them. Each goes through the same store as ``make optimize``: one that was made
there or here before is not made again.
"""

from optimize.api.comparing import compare, compare_runs
from optimize.api.layers import Searched, profile, search, sensitivity
from optimize.api.making import apply, apply_each, load, package, restore, save

__all__ = [
    "Searched",
    "apply",
    "apply_each",
    "compare",
    "compare_runs",
    "load",
    "package",
    "profile",
    "restore",
    "save",
    "search",
    "sensitivity",
]
