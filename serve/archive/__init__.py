"""A ``.mar`` as a file: read, copied, signed, and verified before anything in it is used.

Input: an archive or an artifact folder, and a policy. Work: check every hash, the signature and the ceilings. Output: a
private copy that nobody else can change, or one line with the reason for a refusal.
"""
