"""Templates, style and parts that all pages and figures share."""
