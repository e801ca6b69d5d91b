"""A Flower app with FedLoRA."""
