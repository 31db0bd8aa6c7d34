"""Measuring Unisono beside other libraries: the same calls, on the same cores, in interleaved rounds."""
