"""The directory: worker records under leases, served over a mailbox."""
