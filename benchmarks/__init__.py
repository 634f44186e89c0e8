"""Speed and memory of the ops, beside what else there is for the same work. `ops.py` is the program."""
