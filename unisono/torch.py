"""Unisono for torch: importing this registers the backend "unisono" of torch.distributed."""

from unisono.frameworks.torch.options import Options as Options
from unisono.frameworks.torch.process_group import ProcessGroup as ProcessGroup
from unisono.frameworks.torch.registration import register as register

register()
