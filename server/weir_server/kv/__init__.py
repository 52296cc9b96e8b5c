"""KV memory as numbers: the chunk pool, block allocators, the prefix cache. No tensors here."""
