"""Faults of a Ray Serve application under load (`make chaos-ray`)."""
