"""KV events from the workers to the index: order, gaps, snapshots, other engines' hashes."""
