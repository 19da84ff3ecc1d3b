"""The tasks that text is trained for."""

from addnorm.runs.tasks.base import TextTask
from addnorm.runs.tasks.classify import Classify
from addnorm.runs.tasks.language import Language
from addnorm.runs.tasks.masked import Masked
from addnorm.runs.tasks.translate import Translate

TASKS: dict[str, type[TextTask]] = {
    "translate": Translate,
    "language": Language,
    "masked": Masked,
    "classify": Classify,
}
