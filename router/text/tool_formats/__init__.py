"""How models write calls of functions: one module for each format."""
