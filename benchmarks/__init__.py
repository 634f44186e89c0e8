"""Speed and memory beside what else there is for the same work: the programs are ops.py, decode.py and model.py."""
