"""What a hostile client sends to a server.

In: a name or a seed. Does: makes the bytes, by hand or from an honest image. Out: the same bytes each time, for the
benchmarks that send them and for the tests.
"""
