"""How quantised weights are packed: one module for each format or family of formats."""
