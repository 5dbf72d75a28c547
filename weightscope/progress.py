"""How progress is shown."""

PROGRESS = {"delay": 2, "leave": False, "dynamic_ncols": True}  # of tqdm: a bar for whatever takes over two seconds
