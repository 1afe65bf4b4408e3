"""Baton on Ray Serve: application, configuration, command line. The only folder that imports Ray."""
