"""The server side of a FlowerTune-style app with GLoRA in place of FedAvg. The clients are FlowerTune's own."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from fedlora.flower import FedLoRA

app = ServerApp()
R, ALPHA = 16, 32


@app.main()
def main(grid: Grid, context: Context) -> None:
    base = AutoModelForCausalLM.from_pretrained(context.run_config["model"])
    model = get_peft_model(base, LoraConfig(r=R, lora_alpha=ALPHA, task_type="CAUSAL_LM"))
    arrays = ArrayRecord(get_peft_model_state_dict(model))
    strategy = FedLoRA("glora", context.run_config["num-supernodes"], r=R, lora_alpha=ALPHA)
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=context.run_config["num-rounds"])
    print(result)
