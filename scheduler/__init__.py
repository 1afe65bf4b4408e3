"""Which request runs next, and what becomes of it: queues, budget, batches, results, retraction.

Pure logic: no socket, no thread, no process.
"""
