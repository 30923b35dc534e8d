"""An artifact's description and how to run it: records of JSON files, validated without a library.

Input: ``card.json``, ``serving.json``, ``known.json``. Work: check every value, hash and seal. Output: frozen records:
card, execution, budget, serving, evidence, known answer.
"""
