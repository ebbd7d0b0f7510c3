"""All ranks agree on one number of blocks, or all fail with the same error."""
