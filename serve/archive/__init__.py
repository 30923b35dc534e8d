"""A ``.mar`` as a file: read, copied, signed and verified before anything of it is used.

In: an archive or an artifact folder, and what may be loaded. Does: checks every hash, the signature and the ceilings.
Out: a private copy that nobody else can change, or one line that says why not.
"""
