"""Models on disk: find or make a Hugging Face folder, and say what it is. Never runs a model.

`resolve` turns what a user names into a folder, `tiny` and `gguf` make folders, `card` and `identity`
read them without torch (the gateway uses those two).
"""
