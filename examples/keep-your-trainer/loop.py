"""Fine-tunes a language model on prompts and answers, in a loop of its own."""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedlora.hf import federate, hand_back

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M")
parser.add_argument("--data", default="answers.jsonl")
asked = parser.parse_args()

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(asked.model)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
data = load_dataset("json", data_files=asked.data, split="train")


def collate(rows):
    texts = [f"{row['prompt']}\n{row['response']}{tokenizer.eos_token}" for row in rows]
    batch = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
model = get_peft_model(AutoModelForCausalLM.from_pretrained(asked.model), lora)
federate(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
model.train()
for epoch in range(2):
    for batch in DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f}")

model.save_pretrained("loop-adapter")
hand_back(model, examples=len(data), loss=loss.item())
