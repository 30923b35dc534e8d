"""Whether each record of the tables of rewrites is still needed: small networks that show it, with it and without."""
