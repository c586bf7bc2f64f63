"""Runs kernel bodies unchanged on a CPU and checks what a GPU does not: bounds, unwritten reads, races, deadlocks."""
