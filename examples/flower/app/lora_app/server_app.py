"""The server: FedLoRA in the place of FedAvg."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from peft import get_peft_model_state_dict

from fedlora.flower import FedLoRA
from lora_app.task import CLIENTS, model

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedLoRA(context.run_config["method"], CLIENTS, r=4, lora_alpha=8)
    start = ArrayRecord(get_peft_model_state_dict(model()))
    result = strategy.start(grid, start, num_rounds=context.run_config["num-server-rounds"])
    print(result)
