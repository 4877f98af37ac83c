"""Compares a user's own model, loss and optimizer with the unsharded step, setting by setting."""
