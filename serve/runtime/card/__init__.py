"""What an artifact says of itself, and how it is to be run: records of JSON files, checked without a library.

In: ``card.json``, ``serving.json``, ``known.json``. Does: checks every value, hash and seal.
Out: frozen records: card, execution, budget, serving, evidence, known answer.
"""
