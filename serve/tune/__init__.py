"""Finds the best serving settings of an artifact on this machine by measurement.

Input: an artifact, a limit for p99, an objective. Work: serve it with all promising settings, on a real server under
load. Output: ``serving.json`` beside the card, and the curve of the choice.
"""
