"""A Hugging Face ViT on handwritten digits, frozen by fedfrozen."""
