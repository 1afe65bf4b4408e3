"""The front: OpenAI API, global KV index, choice of prefill and decode worker, streams.

Imports wire/ and common/ only. Never loads torch or transformers.
"""
