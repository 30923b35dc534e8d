"""The rules, one module a subject; each is found because it is here."""
