"""The mesh, the strategies, the rules, and the Layout that follows from them: where every array is
stored.
"""
