"""What administrative calls answer, by subject. PIP-468's shapes and names where it has them. Fields may be added.

Everything here is made of values that were gathered before.
"""
