"""A small GPT-2 that ships with weightscope, so that everything can be tried offline.

Two layers, eight heads, width 256, context 256, a byte-level BPE of 8,000 tokens, trained on
public-domain English books by analyses/toys/train_embedded.py (training.json has the data, time and
loss).
"""

from pathlib import Path

FOLDER = Path(__file__).parent
