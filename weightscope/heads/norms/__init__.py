"""What attention adds up: the lengths of alpha f(x), compared with alpha (norm-based-attention
paper).
"""
