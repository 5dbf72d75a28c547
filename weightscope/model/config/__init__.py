"""Settings of a model: every dialect of config.json, its defaults, and what is computed."""
