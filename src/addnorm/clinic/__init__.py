"""The clinic: will it train, what is wrong with it, and why; for any PyTorch Transformer."""

from addnorm.clinic.evidence import Evidence
from addnorm.clinic.examination import Examination, examine
from addnorm.clinic.findings import Finding
from addnorm.clinic.remedy import Plan

__all__ = ["Evidence", "Examination", "Finding", "Plan", "examine"]
