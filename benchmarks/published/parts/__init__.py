"""Kernels, collectives and exchanges of rows that others measured, beside laws that price them."""
