"""How Hugging Face and timm name and shape the parameters of each model family."""
