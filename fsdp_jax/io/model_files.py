"""Names of the files of a folder in Hugging Face's layout, besides its weights."""

CONFIG = "config.json"
GENERATION = "generation_config.json"  # how programs continue texts, and where they stop
IMAGES = "preprocessor_config.json"

TOKENIZER = "tokenizer.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"  # the chat template, where the settings do not hold it
TOKENIZER_FILES = (
    TOKENIZER, TOKENIZER_SETTINGS, TEMPLATE, "chat_template.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
"""Those of a tokenizer, of which other programs read some that we do not."""

ADAPTER_CONFIG = "adapter_config.json"  # of a folder in PEFT's format
ADAPTER_WEIGHTS = "adapter_model.safetensors"

MODEL_FILES = (CONFIG, GENERATION, IMAGES, *TOKENIZER_FILES)
