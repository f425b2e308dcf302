"""Layouts that others trained in, beside the plans that our searches find for the same."""
