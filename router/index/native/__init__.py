"""The index's C++: a Python extension module without torch and without a binding library.

page_table.h      page hash -> set of holders, in shards that grow one at a time
holder_sets.h     the sets; pages that the same workers hold share one
batch_reader.h    reads event batches from MessagePack without making Python objects
module.cpp        the extension module: the Python class PageTable, and which methods release the GIL

The headers do not use Python. `python -m router.index.native.build` compiles the extension ahead of its first
use.
"""
