"""Per-record gradients: DP-SGD's optimizer and what it watches."""
