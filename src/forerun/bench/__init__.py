"""Comparison of speculative with plain decoding: workloads, measurement, reports. Nothing here changes the engine."""
