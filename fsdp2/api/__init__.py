"""What users call: `fully_shard`, `FSDPModule`, whole tensors, strategies."""
