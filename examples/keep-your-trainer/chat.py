"""Fine-tunes a chat model on conversations, with TRL."""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from fedlora.hf import federate

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
parser.add_argument("--data", default="chats.jsonl")
asked = parser.parse_args()

trainer = SFTTrainer(
    model=asked.model,
    args=SFTConfig(
        output_dir="chat-out",
        learning_rate=2e-4,
        per_device_train_batch_size=4,
        max_steps=20,
        bf16=torch.cuda.is_available(),
        logging_steps=5,
        report_to="none",
    ),
    train_dataset=load_dataset("json", data_files=asked.data, split="train"),
    peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
federate(trainer)
trainer.train()
trainer.save_model("chat-adapter")
