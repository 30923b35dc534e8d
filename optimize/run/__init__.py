"""Carries out a user's job.

Input: a job, or the arguments of the API, and a recipe. Does: makes every stage through the store, then measures and
recommends. Output: a run's folder with report, artifacts and archives.
"""
