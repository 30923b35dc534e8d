"""The Python API for experiments.

Input: the modules, data and settings of a program. Does: loads, applies passes, compares, searches, profiles, packs.
Output: variants, and their measurements. All functions use the same store as ``make optimize``: nothing that is already
there is made again.
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
