"""Expert parallelism over torch.distributed: FP8 on the wire."""
