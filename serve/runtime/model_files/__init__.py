"""Model files of each format, opened only after they were found to be nothing but weights and known operators.

In: a file that the card names. Does: checks it before a library runs anything of it. Out: a program, script or session.
"""
