"""Messages of the request, KV-control and event planes; page hashes; mailboxes. Never imports torch."""
