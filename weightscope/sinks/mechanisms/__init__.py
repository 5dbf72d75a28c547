"""What a model's attention sinks do: measured, in tables, drawn and told (two-sink-mechanisms paper)."""
