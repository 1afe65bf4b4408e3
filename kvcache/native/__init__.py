"""The KV memory's C++: copies of pages (page_copies.cpp), with a plain C interface.

`python -m kvcache.native.build` compiles it ahead of its first use.
"""
