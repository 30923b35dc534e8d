"""What networks are for, one file for each task. `base` has the interface and the registry.

Input: a network's outputs, and the parameters of requests. Work: make answers, write them, compare them. Output:
answers in the forms of every protocol.
"""
