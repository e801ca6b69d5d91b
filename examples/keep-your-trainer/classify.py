"""Fine-tunes an encoder to classify notes, with the Trainer of transformers."""

import argparse

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from fedlora.hf import federate

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="bert-base-uncased")
parser.add_argument("--data", default="notes.jsonl")
asked = parser.parse_args()

LABELS = ["calm", "urgent"]
tokenizer = AutoTokenizer.from_pretrained(asked.model)


def encode(row):
    return {**tokenizer(row["text"], truncation=True, max_length=128), "label": LABELS.index(row["label"])}


data = load_dataset("json", data_files=asked.data, split="train").map(encode)
model = AutoModelForSequenceClassification.from_pretrained(asked.model, num_labels=len(LABELS))
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], task_type="SEQ_CLS"))

trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="classify-out",
        learning_rate=1e-3,
        per_device_train_batch_size=16,
        num_train_epochs=1,
        logging_steps=5,
        report_to="none",
    ),
    train_dataset=data,
    data_collator=DataCollatorWithPadding(tokenizer),
)
federate(trainer)
trainer.train()
trainer.save_model("classify-adapter")
