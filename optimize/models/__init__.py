"""Finds a network and its preprocessing.

Input: a name, a file, a checkpoint. Does: finds, builds, loads, or refuses with the reason. Output: a module with its
weights, and its preprocessing.
"""
