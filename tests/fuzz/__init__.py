"""Hostile and damaged inputs for everything that a user's file or command line can say."""
