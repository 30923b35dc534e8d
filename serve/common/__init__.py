"""Common parts of both packages and of every room here: settings, paths in a store, command lines, progress.

Input: wishes of a person, a file or a program. Work: check them and name them in one place. Output: frozen settings,
paths, command-line options, errors of one line.
"""
