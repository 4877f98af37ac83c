"""The communication contract: the collectives that a strategy declares, checked on the program."""
