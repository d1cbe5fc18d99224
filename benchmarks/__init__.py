"""Benchmarks: looplib's speed, measured side by side with its peers."""
