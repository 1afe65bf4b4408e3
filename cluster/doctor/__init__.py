"""`baton doctor`: can this node, or can all nodes of a Ray cluster, serve a configuration?

gather.py asks a node for its facts, preflight.py tries connections, checks.py judges both without looking at
anything else, and report.py prints. nodes.py does the first two on every node of a Ray cluster.
"""
