"""fusepass: a `torch.compile` backend that fuses residual-add + LayerNorm / RMSNorm.

model = torch.compile(model, backend="fusepass")
print(fusepass.explain(model, x))
"""

from .backend import explain
from .backend import fusepass as backend
from .fuse_pass import FusePass
from .report import Report

__all__ = ["FusePass", "Report", "backend", "explain"]
__version__ = "0.1.0"
