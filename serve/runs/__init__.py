"""A run's folder in a store, as those read it who serve, pack or export it.

In: a store, and words such as ``NAME=RUN/ARTIFACT``. Does: finds what is meant, and checks it by the run's sealed list.
Out: artifact folders, archives by model name, the recommended artifact.
"""
