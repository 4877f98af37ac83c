"""Reads compiled programs: instructions, collectives, replica groups, overlap. Knows nothing of
layouts.
"""
