"""`make clients`: other people's clients against a running Baton."""
