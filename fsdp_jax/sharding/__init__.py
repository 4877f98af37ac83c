"""The mesh, the strategies, the rules, and the Layout: how every array is sharded."""
