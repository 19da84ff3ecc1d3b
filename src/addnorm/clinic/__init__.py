"""The clinic: will a model train, what is wrong with it, and why; for any PyTorch Transformer."""

from addnorm.clinic.call_model import ClinicBatch
from addnorm.clinic.evidence import Evidence
from addnorm.clinic.examination import Examination, examine
from addnorm.clinic.rehearsal import TrainingPlan
from addnorm.clinic.rules import Finding
from addnorm.clinic.watch import Watch, lightning_callback, trainer_callback, watch

__all__ = [
    "ClinicBatch",
    "Evidence",
    "Examination",
    "Finding",
    "TrainingPlan",
    "Watch",
    "examine",
    "lightning_callback",
    "trainer_callback",
    "watch",
]
