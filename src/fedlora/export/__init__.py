"""An adapter beside its base model: attached by peft, merged into the full model, or written as GGUF."""
