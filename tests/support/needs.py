"""For each extra, a few lines that need what it brings; run by an installed fedlora, outside of the checkout."""

ADAPTERS = """
import torch
from fedlora import Adapter, AdapterSpec, LoRA, write_adapter
for name, rank in (("a", 2), ("b", 3)):
    lora = LoRA(B=torch.ones(8, rank), A=torch.ones(rank, 6) / 7)
    write_adapter(name, Adapter({"q": lora}), AdapterSpec({"peft_type": "LORA", "target_modules": ["q"]}))
"""
# Extra -> what needs it. With `train` where the extra adds something to runs, as its line in pyproject.toml says.
NEEDS = {
    "train": "import fedlora.training.loop, fedlora.runs.execution, fedlora.training.metrics\n"
    "from scipy import stats; import fedlora.experiments.tables; print('sound')",
    "train,plot": "import fedlora.runs.plots as p; from pathlib import Path\n"
    "p.saved(p.plt.figure(), Path('o.png'))\n"
    "print('sound' if Path('o.png').stat().st_size else '')",
    "hub": "from datasets import Dataset; from fedlora.data import read_classification\n"
    "d = Dataset.from_dict({'text': ['good', 'bad'], 'label': [1, 0]})\n"
    "print('sound' if len(read_classification(d, text='text', label='label')) == 2 else '')",
    "privacy": "from fedlora.privacy.accounting import epsilon; from fedlora.privacy import Mechanism; import torch\n"
    "Mechanism.of(1.0, 1.0, 4).noised(torch.zeros(4, dtype=torch.int64))\n"
    "print('sound' if 0 < epsilon(2.0, 1, 1e-3) < 10 else '')",
    "train,track": "from fedlora.runs.tracking import check_trackers; check_trackers(['tensorboard']); print('sound')",
    "flower": "import fedlora.flower.strategy, fedlora.flower.server.up, fedlora.flower.site.trainer\n"
    "import fedlora.flower.server.doctor, cryptography; print('sound')",
}
