"""The processes of a worker that computes its model in several ranks (engine/parallel)."""
