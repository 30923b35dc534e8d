"""What a network is for: one file for each task. In: outputs and targets. Out: losses, scores, intervals, words.

`serve/runtime/tasks/` has the other half of each task, which turns outputs into answers.
"""
