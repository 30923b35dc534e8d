"""Recovers accuracy without training: by channel scales, weights' scales, rounding and biases.

In: a float or calibrated network and calibration images. Does: corrects it layer by layer. Out: the network, in place.
"""
