"""The embedded tiny Qwen3 model: data, tokenizer, training, export and evaluation."""
