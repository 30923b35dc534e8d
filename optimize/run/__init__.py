"""What the user asks for, and how it is carried out.

In: a job or the API's words, and a recipe. Does: every stage through the store, then measures and recommends.
Out: a run's folder, with report, artifacts and archives.
"""
