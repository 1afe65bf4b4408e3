"""The router's C++: a Python extension of its own, no torch, no binding library.

page_table.h      page hash -> set of holders, in shards that grow one by one
holder_sets.h     the sets, shared by all pages that the same workers hold
batch_reader.h    event batches, read from MessagePack without making Python objects
kv_prices.h       policy `kv`: the prices of all workers, and the cheapest

None of these knows Python; *_type.cpp is the Python face of each type (and says who has the GIL), module.cpp
puts them together, python_face.h is what they share.

`python -m router.index.native.build` compiles it ahead of the first use.
"""
