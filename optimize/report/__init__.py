"""What a run found, shown: in a terminal, as a page, as plots.

In: a run's typed rows and facts. Does: words, tables, drawings; nothing is measured or judged here.
Out: text, HTML, SVG, PNG.
"""
