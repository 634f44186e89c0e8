"""The kernels themselves, in Triton's language: what Python checkers say of them is not meant for them."""
