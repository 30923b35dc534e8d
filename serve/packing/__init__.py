"""Archives of a whole run, each with its bill of materials; and the audit of what they will run on.

In: a run in a store, and options. Does: packs, lists components, asks for known vulnerabilities.
Out: ``.mar`` files with ``.mar.cdx.json`` beside them, both in the run's sealed list; advisories.
"""
