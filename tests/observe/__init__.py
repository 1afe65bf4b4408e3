"""`make observe`."""
