"""Who is there: worker records under leases, served over a mailbox."""
