"""Recovery of accuracy without training: channels scaled against each other, weights' scales, rounding and biases.

In: a float or calibrated network and calibration images. Does: mends it layer by layer. Out: the network, in place.
"""
