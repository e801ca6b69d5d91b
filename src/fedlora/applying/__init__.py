"""The base model with an adapter written into it: transformers loads and saves it, peft says what the adapter means."""
