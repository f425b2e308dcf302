"""The same entries in other places: views first, then parts and indexing."""
