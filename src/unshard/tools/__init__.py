"""Reports the dtypes in which a sharded model computes, reduces and updates."""

from .precision_audit import PrecisionAudit, precision_audit
from .precision_report import PrecisionReport, precision

__all__ = ["PrecisionAudit", "PrecisionReport", "precision", "precision_audit"]
