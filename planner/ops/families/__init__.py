"""Op families: one file each, which registers its sharding rules when it is imported."""
