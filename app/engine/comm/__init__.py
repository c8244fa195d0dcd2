"""Collectives between the ranks of a model, by Gloo or by a device's library. With a single rank they do nothing.

Messages of rank 0 to the others are in `ranks`.
"""
