"""Per-record gradients and products with their Jacobians."""
