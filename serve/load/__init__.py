"""A load generator: HTTP/1.1 over kept connections, in a process of its own, cheap enough to share the cores.

In: a workload (requests, each with its known answer) and a plan (clients or a rate, seconds). Does: sends, times and
checks every answer. Out: counts by verdict, latencies, the stages that the server told, and its own CPU time.
"""
