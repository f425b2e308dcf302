"""Stages whose pp ranks have meshes of their own (``meshes="own"``)."""
