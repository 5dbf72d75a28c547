"""What weightscope finds of faults, directions and lineages that were planted on purpose."""
