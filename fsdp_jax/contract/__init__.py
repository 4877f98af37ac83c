"""The communication contract: the collectives that a strategy promises, checked on the compiled
program.
"""
