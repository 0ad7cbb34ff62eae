"""What a call says that is wrong, when torch.compile takes it."""

import torch
from torch.torch_version import TorchVersion

# Dynamo of torch 2.8 keeps to itself what the code that it traces raises; 2.11 says it.
SILENT = TorchVersion(torch.__version__) < (2, 11)


def said(message: str) -> str:
    """The pattern of an eager call's message, or of what an old Dynamo makes of it."""
    return f"{message}|Observed exception" if SILENT else message
