"""Training from a configuration: config, run (configuration to objects), start, loop, metrics,
screen, stop.
"""
