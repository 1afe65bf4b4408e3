"""More than the workers can do, with default options (`make overload`)."""
