"""Training from a configuration: its keys, the objects that it describes, and the training loop."""
