"""The name of the backend in torch.distributed, the types of devices that it serves, and the oldest torch."""

NAME = "unisono"
DEVICES = ("cpu", "cuda")
OLDEST_TORCH = "2.8"
