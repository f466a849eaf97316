"""Where every byte of a sharded parameter lies: meshes, layouts, parameters, buckets."""
