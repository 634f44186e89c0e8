"""Triton kernels: fixed configurations, deterministic, run by Triton's interpreter where there is no GPU."""
