"""The global index: which worker holds which page, in which tier."""
