"""BidirectionalGatedDeltaNet: delta rule for commit rows, block softmax with a history slot for preview rows."""
