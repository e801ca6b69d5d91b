"""The server side of a FlowerTune-style app with GLoRA in place of FedAvg. The clients are FlowerTune's own."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from fedlora.flower.stock import stock_strategy

app = ServerApp()
R, ALPHA = 16, 32


@app.main()
def main(grid: Grid, context: Context) -> None:
    base = AutoModelForCausalLM.from_pretrained(context.run_config["model"])
    model = get_peft_model(base, LoraConfig(r=R, lora_alpha=ALPHA, task_type="CAUSAL_LM"))
    state = get_peft_model_state_dict(model)
    strategy = stock_strategy(state, r=R, alpha=ALPHA, clients=["site-1", "site-2", "site-3"], method="glora")
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(state), num_rounds=context.run_config["num-rounds"])
    print(result)
