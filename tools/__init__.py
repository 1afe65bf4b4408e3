"""What builds and checks the project: the demo, its model, its quality. For developers; not installed."""
