"""The gradient engine: named arrays are averaged over ranks in buckets, while others are still being computed."""
