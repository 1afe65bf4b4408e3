"""Model families, one module per kind of memory. engine/gate.py merges the tables of these modules."""
