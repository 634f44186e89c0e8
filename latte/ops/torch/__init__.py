"""Chunked PyTorch implementations for any device: linear time and memory, closed-form gradients."""
