"""The page of the admin listener that shows a running Baton in a browser."""
