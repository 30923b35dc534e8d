"""What is kept, and under which key.

In: named inputs of a result and a function that makes it. Does: makes it once, whole or not at all.
Out: artifacts and measurements, checked whenever they are opened.
"""
