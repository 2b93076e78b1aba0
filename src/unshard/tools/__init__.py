"""What helps to understand a sharded model: in which precision it computes, reduces and learns."""

from .audit import PrecisionAudit, precision_audit
from .report import PrecisionReport, precision

__all__ = ["PrecisionAudit", "PrecisionReport", "precision", "precision_audit"]
