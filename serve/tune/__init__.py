"""Finds by measurement how an artifact is best served on this machine.

In: an artifact, a bound on p99, an objective. Does: serves it in each way that could win, on a real server under load.
Out: ``serving.json`` beside the card, and the curve that it was chosen from.
"""
