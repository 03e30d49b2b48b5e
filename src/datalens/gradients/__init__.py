"""Per-record gradients: the optimizer of DP-SGD, and the checks around it."""
