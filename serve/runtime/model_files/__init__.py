"""Model files of each format. A file is opened only if it has nothing but weights and known operators.

Input: a file that the card names. Work: check it before a library runs anything of it. Output: a program, script or
session.
"""
