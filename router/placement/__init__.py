"""Chooses a request's workers, and when it may have them: load, policies, placer, admission, prediction."""
