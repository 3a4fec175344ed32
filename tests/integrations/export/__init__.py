"""Folders for `from_pretrained`, from runs of models of transformers and peft."""
