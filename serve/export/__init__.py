"""Manifests and model repositories, to serve an artifact on several hosts by existing engines.

Input: a run's artifact, and how to run it. Work: pack it and write files, in one module for each target. A target is
registered by its module's presence. Output: a folder for you to apply. Nothing is sent anywhere.
"""
