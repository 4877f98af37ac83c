"""Files: safetensors, atomic writes, and reading slices into the shards of arrays."""
