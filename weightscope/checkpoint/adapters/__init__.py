"""Adapters over a base: `lora` (PEFT, and the changes themselves), `mlx_lm`, `diffusion`."""
