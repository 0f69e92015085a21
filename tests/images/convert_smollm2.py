"""Convert the GGUF file in a directory of installed packages to a Hugging Face directory: ``convert IN OUT``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main() -> None:
    """Convert, and refuse a result that does not know the capital of France."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    (gguf,) = source.rglob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # A fresh model of the same shape: the loaded one remembers that it came from GGUF and would say so in its config.
    config = quantized.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    outcome = model.load_state_dict(quantized.state_dict(), strict=False)
    if outcome.unexpected_keys or set(outcome.missing_keys) - {"lm_head.weight"}:
        raise SystemExit(f"the weights do not fit: {outcome}")
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    text = tokenizer.decode(model.generate(prompt, max_new_tokens=5, do_sample=False)[0])
    print(text)
    if "Paris" not in text:
        raise SystemExit("the converted model is not the model")
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main()
