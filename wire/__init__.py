"""Messages of the request, KV-control and event planes; page hashes; mailboxes.

The lowest room of the house: it imports nothing of ours and never torch, so the router stays light.
"""
