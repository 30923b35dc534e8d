"""What both packages and every room of this one stand on: settings, places in a store, command lines, progress.

In: what a person, a file or a program asks for, in words. Does: checks it and names it, once for all.
Out: frozen settings, paths, options of a command line, errors of one line.
"""
