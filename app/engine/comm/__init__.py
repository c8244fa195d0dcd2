"""Collectives between the ranks of a model, by Gloo or by a device's library. Those of a single rank do nothing.

Messages of rank 0 to the others are in `ranks`.
"""
