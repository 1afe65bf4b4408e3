"""Who computes a request, and when: load, policies, placer, admission, prediction."""
