"""Tenancy: which private pages become everybody's.

config.py      TenancyConfig
visibility.py  a private node becomes public; two nodes with the same pages become one
promotion.py   which private pages become public, and when
demotion.py    which public pages stop being public, when a tenant seems to guess
usage.py       per node and epoch: hits and distinct tenants
marks.py       pages that are public by the operator's word, and pages that are private for ever
report.py      visibility and counters for `baton tree` and `baton cache`
removal.py     what belongs to a tenant goes from device and host

Finding public and own pages is the tree's own (kvcache/mixed_path.py).
"""
