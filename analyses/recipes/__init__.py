"""A paper each: what is loaded, computed, written and drawn, in this order."""
