"""Which heads of the first layer put split words together, by tokens and by position."""
