"""What is written otherwise because int8 kernels for CPUs with AMX get it wrong, one file a fault."""
