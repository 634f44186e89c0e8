"""The oracle: every operation token by token, as its formula reads. No backend imports it."""
