"""Reads compiled programs: instructions, collectives, replica groups, overlap; knows no layouts."""
