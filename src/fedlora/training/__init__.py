"""A client's local work on torch, transformers and peft, and how its result is measured. Needs `fedlora[train]`."""

from typing import TYPE_CHECKING

from fedlora._lazy import face

if TYPE_CHECKING:
    from fedlora.training.evaluation import ModelEvaluator
    from fedlora.training.grouped import GroupedTrainer
    from fedlora.training.local import LocalTrainer, TrainSettings
    from fedlora.training.models import AdaptedModel, LoRASettings
    from fedlora.training.modules import LoRAModule, ModuleEvaluator, ModuleTrainer

__getattr__ = face(
    "fedlora.training",
    {
        "models": ("AdaptedModel", "LoRASettings"),
        "local": ("LocalTrainer", "TrainSettings"),
        "grouped": ("GroupedTrainer",),
        "evaluation": ("ModelEvaluator",),
        "modules": ("LoRAModule", "ModuleEvaluator", "ModuleTrainer"),
    },
    extra="train",
)

__all__ = [
    "AdaptedModel", "GroupedTrainer", "LoRAModule", "LoRASettings", "LocalTrainer", "ModelEvaluator", "ModuleEvaluator",
    "ModuleTrainer", "TrainSettings",
]  # fmt: skip
