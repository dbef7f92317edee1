"""Training: texts, batches, losses, the multi-step unroll and the training loop."""
