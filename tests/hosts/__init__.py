"""Prefill, decode and router on hosts of their own: network namespaces (`make two-hosts`)."""
