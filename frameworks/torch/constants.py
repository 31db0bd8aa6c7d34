"""The name of the backend in torch.distributed, and the types of devices that it serves."""

NAME = "unisono"
DEVICES = ("cpu", "cuda")
