"""The command `python -m jaxdl.convert`: checkpoints of Hugging Face become workdirs, and the other way round."""

HF_CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
"""The names of a checkpoint's files: its config, its tensors in one file, and the index of several files."""
