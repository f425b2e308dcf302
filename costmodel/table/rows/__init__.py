"""Rows of a table: read, blanks filled, words understood, predictions written."""
