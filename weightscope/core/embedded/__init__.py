"""A small GPT-2 that ships with weightscope, so that everything can be tried offline.

Four layers, six heads, width 192, context 256, a byte-level BPE of 8,000 tokens, trained on
public-domain English books by analyses/toys/train_embedded.py (training.json has the data, the runs
and the losses). Heads of its last two layers attend to the previous token, and two do induction.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
