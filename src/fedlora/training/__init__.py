"""Local training and evaluation with torch, transformers and peft. Needs `fedlora[train]`."""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.training.loop import LocalTrainer
    from fedlora.training.measure import ModelEvaluator
    from fedlora.training.models import AdaptedModel
    from fedlora.training.programs import Program, ProgramTrainer
    from fedlora.training.settings import LoRASettings, TrainSettings

__getattr__ = face(
    "fedlora.training",
    {
        "models": ("AdaptedModel",),
        "loop": ("LocalTrainer",),
        "programs": ("Program", "ProgramTrainer"),
        "settings": ("LoRASettings", "TrainSettings"),
        "measure": ("ModelEvaluator",),
    },
    extra="train",
)

__all__ = [
    "AdaptedModel", "LoRASettings", "LocalTrainer", "ModelEvaluator", "Program", "ProgramTrainer", "TrainSettings",
]  # fmt: skip
