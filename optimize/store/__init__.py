"""Keeps results under keys.

Input: the named inputs of a result, and a function that makes it. Does: makes the result once, completely or not at
all. Output: artifacts and measurements, which are checked whenever they are opened.
"""
