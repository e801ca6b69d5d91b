"""For each extra, a few lines that need what it brings; run by an installed fedlora, outside of the checkout."""

ADAPTERS = """
import torch
from fedlora import Adapter, AdapterSpec, LoRA, write_adapter
for name, rank in (("a", 2), ("b", 3)):
    lora = LoRA(B=torch.ones(8, rank), A=torch.ones(rank, 6) / 7)
    write_adapter(name, Adapter({"q": lora}), AdapterSpec({"peft_type": "LORA", "target_modules": ["q"]}))
"""
# What the pages promise of the core alone: all methods, audits, checkpoints, adapters in and out.
ON_THE_CORE = """
from pathlib import Path

import torch

from fedlora import METHODS, Adapter, AdapterSpec, Client, LoRA, Server, Upload, build, read_adapter, write_adapter
from fedlora.adapters import merge, resize
from fedlora.analysis.audit import audit
from fedlora.client import receive, send
from fedlora.core.checkpoint import load_newest, save
from fedlora.server import ServerState
from fedlora.testing import check, comparing

start = Adapter({"q": LoRA(B=torch.zeros(8, 2), A=torch.ones(2, 6) / 7)})
for name in METHODS:
    server = Server(build(name))
    state = server.init(start)
    for _ in range(2):
        uploads = []
        for client in (Client("a", 2), Client("b", 2)):
            download = server.download(state, client)
            mine = receive(download, kept=None).map(lambda t: t + torch.randn_like(t) / 9)
            uploads.append(Upload(client, 3, send(mine, download.roles)))
        state = server.aggregate(state, uploads)
    save(Path(name), 2, state)
    again = load_newest(Path(name), ServerState, type(state.modules["q"]))
    assert again is not None and comparing.leaves(again[1]) == comparing.leaves(state), name
check(build("glora"))
spec = AdapterSpec({"peft_type": "LORA", "target_modules": ["q"]})
for name in "ab":
    write_adapter(name, start.map(lambda t: t + 1), spec)
merge(["a", "b"], "merged")
resize("merged", "small", rank=1)
assert read_adapter("small")[0].modules["q"].rank == 1
print("sound")
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
