"""Rewrites for faults of OpenVINO. One file for each fault, with the version in which it was seen."""
