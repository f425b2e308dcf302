"""Ops entry by entry or along a dim, and ops that make tensors; their time is that of memory."""
