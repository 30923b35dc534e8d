"""Shows a run's results: in a terminal, as a page, as plots.

Input: a run's typed rows and facts. Does: makes text, tables and drawings. It measures and judges nothing. Output:
text, HTML, SVG, PNG.
"""
