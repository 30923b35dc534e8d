"""A run's folder in a store, as read by the rooms that serve, pack or export it.

Input: a store, and words like ``NAME=RUN/ARTIFACT``. Work: find the files, and check them by the run's sealed list.
Output: artifact folders, archives by model name, the recommended artifact.
"""
