"""`ray up` and everything after it, on hosts made of namespaces (`make cluster`)."""
