"""The front: OpenAI API, global KV index, choice of prefill and decode worker, streams.

Knows wire only; never loads torch or transformers (DESIGN section 1).
"""
