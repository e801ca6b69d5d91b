"""Local training and evaluation with torch, transformers and peft. Needs `fedlora[train]`."""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.training.evaluation import ModelEvaluator
    from fedlora.training.local import LocalTrainer
    from fedlora.training.models import AdaptedModel
    from fedlora.training.modules import LoRAModule, ModuleEvaluator, ModuleTrainer
    from fedlora.training.programs import Program, ProgramTrainer
    from fedlora.training.settings import LoRASettings, TrainSettings

__getattr__ = face(
    "fedlora.training",
    {
        "models": ("AdaptedModel",),
        "local": ("LocalTrainer",),
        "programs": ("Program", "ProgramTrainer"),
        "settings": ("LoRASettings", "TrainSettings"),
        "evaluation": ("ModelEvaluator",),
        "modules": ("LoRAModule", "ModuleEvaluator", "ModuleTrainer"),
    },
    extra="train",
)

__all__ = [
    "AdaptedModel", "LoRAModule", "LoRASettings", "LocalTrainer", "ModelEvaluator", "ModuleEvaluator", "ModuleTrainer",
    "Program", "ProgramTrainer", "TrainSettings",
]  # fmt: skip
