"""Film reviews of the demo as conversations: a question and an answer of one word. Writes reviews.jsonl."""

import json

from fedlora.data import demo_data

reviews = demo_data()
rows = range(0, len(reviews), 30)
with open("reviews.jsonl", "w") as file:
    for k in rows:
        question = f"Is this film review positive or negative? Answer with one word.\n\n{reviews.text[k]}"
        answer = reviews.label_names[reviews.labels[k]]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        file.write(json.dumps({"messages": messages}) + "\n")
