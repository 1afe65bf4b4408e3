"""The page table in C++, as a Python extension of its own: no torch, no binding library.

module.cpp        the Python face and the GIL
page_table.h      page hash -> set of holders, in shards that grow one by one
holder_sets.h     the sets, shared by all pages that the same workers hold
batch_reader.h    event batches, read from MessagePack without making Python objects

`python -m router.native.build` compiles it ahead of the first use.
"""
