"""Shares of a worker's KV memory per tenant.

config.py   SharesConfig: which part of each group's pages a tenant keeps, and may have
pages.py    TenantPages: how many pages of a group each tenant has on the tree, and which of them go first
evictor.py  SharedEvictor: a queue per tenant, and which tenant is next

A share limits what is cached, not what is admitted: guaranteed pages are evicted last, and not never.
"""
