"""Files: safetensors, durable writes, and slices read into the shards of arrays."""
