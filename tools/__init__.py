"""Tools for the documentation: how it reads, the pages that are made from the code, and the site."""
