"""Ways to choose scales and codes with a lower error than absmax, in the same format."""
