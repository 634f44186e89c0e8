"""The tensors of the mixture, in the order in which the custom operations of every backend take them."""

TENSORS = ("q", "k", "v", "window_q", "window_k", "mask", "log_norm", "mean", "past_keys", "past_values", "past_valid")
DIFFERENTIABLE = ("q", "k", "v", "window_q", "window_k", "log_norm", "mean", "past_keys", "past_values")
