"""Where a checkpoint comes from, and what was done to it: sketches of heads, how layers match, what
changed.
"""
