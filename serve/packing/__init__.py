"""Packs the archives of a whole run, each with its bill of materials, and audits their dependencies.

Input: a run in a store, and options. Work: pack, list components, query known vulnerabilities. Output: ``.mar`` files
with ``.mar.cdx.json`` beside them, both in the run's sealed list, and advisories.
"""
