"""What other programs call a key, for the error of an unknown one."""

SYNONYMS = {  # a key's last name, or its table and name, elsewhere -> the key here
    # tables
    "defence": "robust", "defense": "robust", "aggregation": "robust", "training": "train", "peft": "lora",
    "dataset": "data", "dp": "privacy", "evaluation": "evaluate", "strategy": "method",
    # flwr
    "num_rounds": "run.rounds", "num_server_rounds": "run.rounds", "fraction_train": "run.participation",
    "fraction_fit": "run.participation", "clients_per_round": "run.participation",
    "min_available_clients": "server.quorum", "min_train_nodes": "server.quorum", "min_fit_clients": "server.quorum",
    "num_clients": "clients.count", "num_partitions": "clients.count", "num_supernodes": "clients.count",
    "partition_by": "data.label", "min_partition_size": "clients.min_examples",
    "num_malicious_clients": "robust.byzantine", "num_malicious_nodes": "robust.byzantine",
    "clipping_threshold": "robust.threshold", "local_epochs": "train.num_train_epochs",
    "local_steps": "train.max_steps",
    # peft
    "lora.r": "clients.ranks", "lora.rank": "clients.ranks",
    "use_gradient_checkpointing": "model.gradient_checkpointing",
    # transformers, trl, datasets
    "model_name_or_path": "model.name", "base_model": "model.name", "pretrained_model_name_or_path": "model.name",
    "torch_dtype": "model.dtype", "load_in_8bit": "model.load_in_4bit",
    "per_device_train_batch_size": "train.batch_size",
    "per_device_eval_batch_size": "evaluate.batch_size", "optim": "train.optimizer",
    "max_seq_length": "data.max_length", "dataset_text_field": "data.text", "label_column": "data.label",
    "text_column": "data.text", "metric_for_best_model": "evaluate.metric", "eval_steps": "evaluate.every",
    "save_steps": "run.checkpoint_every", "save_total_limit": "run.keep_checkpoints",
    "dataloader_num_workers": "run.workers", "num_epochs": "train.num_train_epochs",
    "gradient_clipping": "train.max_grad_norm",
    # opacus, dp-accounting
    "l2_norm_clip": "privacy.clipping_norm", "target_epsilon": "privacy.epsilon", "target_delta": "privacy.delta",
    # shorter words for ours
    "model.path": "model.name", "targets": "lora.target_modules", "lora.alpha": "lora.lora_alpha",
    "lora.dropout": "lora.lora_dropout", "rslora": "lora.use_rslora", "lr": "train.learning_rate",
    "train.clip": "train.max_grad_norm", "steps": "train.max_steps", "epochs": "train.num_train_epochs",
    "schedule": "train.lr_scheduler_type", "patience": "evaluate.early_stopping_patience",
    "min_delta": "evaluate.early_stopping_threshold", "privacy.clip": "privacy.clipping_norm",
    "clients.alpha": "clients.dirichlet_alpha", "labels": "data.label_names", "template": "data.chat_template",
}  # fmt: skip
