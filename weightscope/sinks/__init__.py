"""Attention sinks: is what they write a constant, and do they do nothing or tell everyone something?"""
