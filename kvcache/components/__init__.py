"""Components: one KV group's part of the tree each. None knows another."""
