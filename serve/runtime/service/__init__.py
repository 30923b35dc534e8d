"""The service: an opened artifact that many threads may call.

Input: request bodies. Work: decode beside the engine, form batches while it runs, use the first execution that works.
Output: classes for each image, a JSON answer, and the time of each stage.
"""
