"""A client: peft's state dict in, some steps, peft's state dict out. Nothing here is of fedlora."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import get_peft_model_state_dict, set_peft_model_state_dict

from lora_app.task import data, model, trained

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    mine, (x, y) = model(), data(int(context.node_config["partition-id"]))
    set_peft_model_state_dict(mine, message.content["arrays"].to_torch_state_dict())
    loss = trained(mine, x, y)
    metrics = MetricRecord({"num-examples": len(x), "train_loss": loss})
    arrays = ArrayRecord(get_peft_model_state_dict(mine))
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
