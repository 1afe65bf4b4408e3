"""The tiers below the device: what leaves the device goes to the host, and from there to a storage."""
