"""Machines to plan for: chips, links, matmul efficiency, and compilers for hardware that is not
there.
"""
