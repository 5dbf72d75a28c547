"""Attention sinks: is what they write a constant, and are they NOPs or broadcasts?"""
