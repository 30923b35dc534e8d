"""Rewrites for CPUs with AMX, whose int8 kernels get some shapes wrong. One file for each fault."""
