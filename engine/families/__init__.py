"""Model families, one module per kind of memory. engine/gate.py merges their tables."""
