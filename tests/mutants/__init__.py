"""Faults of one line, each with the tests that must see it (`make mutants`)."""
